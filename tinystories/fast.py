"""A frozen copy of a network that samples and scores faster: `pack(model)`.

The copy shares the weights of the network and gives the same results up to rounding. It has no
gradients, and it does not see later changes of the weights: pack again after training.

    linear layers   the weight is stored once more in the order that oneDNN reads, so that it is not
                    rearranged for every product; GELU is applied within the product
    decoding        keys and values are written into blocks that stay in place (`cache.py`)

The plain layers are what the packed ones are tested against. I inputs, O outputs.
"""

import copy
import ctypes
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.cache import PromptCache
from tinystories.gpt_neo import GPTNeo, Linear, LinearGELU
from tinystories.products import has_fast_product, onednn, suits_onednn

ROWS = 256  # of the products that a packed weight is laid out for; it serves other sizes as well


def pack(module: nn.Module) -> nn.Module:
    """A frozen copy of a network for inference, which shares the parameters of `module`."""
    if isinstance(module, Linear):
        gelu = module.approximate if isinstance(module, LinearGELU) else ""
        return PackedLinear(module.weight, module.bias, gelu)
    packed = copy.copy(module)
    own = module.named_parameters(recurse=False)
    packed._parameters = {name: value.detach() for name, value in own}
    packed._modules = {name: pack(child) for name, child in module.named_children()}
    if isinstance(module, GPTNeo):
        packed.lm_head = PackedLinear(module.output_weight)
        packed.new_cache = PromptCache
    return packed


class PackedLinear(nn.Module):
    """x W^T + b with the weight in oneDNN's order, and GELU of a kind if one is given."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: str = ""):
        super().__init__()
        self.weight = weight.detach()  # [O, I]
        self.bias = None if bias is None else bias.detach()  # [O]
        self.gelu = gelu
        self.packed = self.weight
        if has_fast_product(weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        if suits_onednn(x, self.weight):
            return onednn(x, self.packed, self.bias, self.gelu)
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y, approximate=self.gelu) if self.gelu else y


def keep_freed_memory() -> None:
    """Let malloc keep the pages of freed tensors; does nothing where the C library is not glibc.

    glibc hands every large tensor back to the system when it is freed, and the next step then waits
    for fresh zeroed pages: about a third of the time of a training step. No result changes.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):
        library.mallopt(-4, 0)  # M_MMAP_MAX of <malloc.h>
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
