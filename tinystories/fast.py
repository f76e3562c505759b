"""A frozen copy of a network that samples and scores faster: `pack(model)`.

The copy shares the weights of the network and gives the same results up to rounding. It has no
gradients, and it does not see later changes of the weights: pack again after training.

    linear layers   the weight is stored once more in the order that oneDNN reads, so that it is not
                    rearranged for every product; GELU is applied within the product
    attention       one product for q, k and v
    decoding        keys and values are written into blocks that stay in place (`fast_cache.py`)

The plain layers are what the packed ones are tested against. B batch, T new positions, S positions
seen, H heads, D width, V vocabulary.
"""

import copy
import ctypes
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.fast_cache import PromptCache
from tinystories.gpt_neo import Attention, GPTNeo, Linear, LinearGELU, at_least_float32
from tinystories.products import has_fast_product, onednn, suits_onednn

ROWS = 256  # of the products that a packed weight is laid out for; it serves other sizes as well


def pack(module: nn.Module) -> nn.Module:
    """A frozen copy of a network for inference, which shares the parameters of `module`."""
    if isinstance(module, GPTNeo):
        return PackedGPTNeo(module)
    if isinstance(module, Attention):
        return PackedAttention(module)
    if isinstance(module, LinearGELU):
        return PackedLinear(module.weight, module.bias, module.approximate)
    if isinstance(module, Linear):
        return PackedLinear(module.weight, module.bias)
    packed = copy.copy(module)
    packed._parameters = {
        name: value if value is None else value.detach()
        for name, value in module._parameters.items()
    }
    packed._modules = {name: pack(child) for name, child in module.named_children()}
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


class PackedAttention(Attention):
    """The same attention with one product for q, k and v."""

    def __init__(self, plain: Attention):
        nn.Module.__init__(self)
        self.layer = plain.layer
        self.num_heads = plain.num_heads
        self.window = plain.window
        self.q_proj = pack(plain.q_proj)
        self.k_proj = pack(plain.k_proj)
        self.v_proj = pack(plain.v_proj)
        self.out_proj = pack(plain.out_proj)
        weights = [plain.q_proj.weight, plain.k_proj.weight, plain.v_proj.weight]
        self.joint = PackedLinear(torch.cat([weight.detach() for weight in weights]))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each [B, T, D]: one product where it is large enough to pay."""
        if suits_onednn(x, self.q_proj.weight):
            return self.joint(x).split(x.shape[-1], -1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class PackedGPTNeo(GPTNeo):
    """The same language model without gradients; its decoders share the prompt among all rows."""

    def __init__(self, plain: GPTNeo):
        nn.Module.__init__(self)
        self.config = plain.config
        self.wte = pack(plain.wte)
        self.wpe = pack(plain.wpe)
        self.h = pack(plain.h)
        self.ln_f = pack(plain.ln_f)
        self.output = PackedLinear(plain.output_weight)

    def new_cache(self) -> PromptCache:
        """An empty cache."""
        return PromptCache()

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], float32 or wider, of hidden states [..., D]."""
        return at_least_float32(self.output(hidden))


def keep_freed_memory() -> None:
    """Let malloc keep the pages of freed tensors; does nothing where the C library is not glibc.

    glibc hands every large tensor back to the system when it is freed, and the next step then waits
    for fresh zeroed pages: about a third of the time of a training step. No result changes.
    """
    trim_threshold = -1  # names and numbers of <malloc.h>
    mmap_max = -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
