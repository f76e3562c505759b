"""A frozen copy of a network that samples and scores faster: `pack(model)`.

It shares the weights, gives the same results up to rounding, and has no gradients. It does not see
later changes of the weights: pack again after training. Those of linear layers are stored once more
in the order that oneDNN reads, and GELU is applied within the product.
"""

import copy
import ctypes
import sys
from typing import TypeVar

import torch
from torch import nn

from tinystories.gpt_neo import GPTNeo, Linear
from tinystories.products import has_fast_product

ROWS = 256  # of the products that a packed weight is laid out for; it serves other sizes as well
Network = TypeVar("Network", bound=nn.Module)


def pack(module: Network) -> Network:
    """A frozen copy of a network for inference, which shares the parameters of `module`."""
    packed = copy.copy(module)
    frozen = {name: value.detach() for name, value in module.named_parameters(recurse=False)}
    vars(packed)["_parameters"] = module._parameters | frozen
    vars(packed)["_buffers"] = dict(module._buffers)
    vars(packed)["_modules"] = {name: pack(child) for name, child in module.named_children()}
    if isinstance(packed, Linear) and has_fast_product(packed.weight):
        packed.packed = torch.ops.mkldnn._reorder_linear_weight(packed.weight, ROWS)
    if isinstance(packed, GPTNeo) and packed.lm_head is None:
        vocab_size, width = packed.output_weight.shape
        head = Linear(width, vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(packed.output_weight, requires_grad=False)
        packed.lm_head = pack(head)
    return packed


def keep_freed_memory() -> None:
    """Let glibc's malloc, if that is in use, keep the pages of freed tensors.

    Waiting for fresh zeroed pages takes about a third of the time of a training step.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):
            library.mallopt(-4, 0)  # M_MMAP_MAX of <malloc.h>
            library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
