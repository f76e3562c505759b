"""A frozen copy of a network that samples and scores faster: `pack(model)`.

The copy shares the weights of the network and gives the same results up to rounding. It has no
gradients, and it does not see later changes of the weights: pack again after training.

    linear layers   the weight is stored once more in the order that oneDNN reads, so that it is not
                    rearranged for every product; GELU is applied within the product
    attention       one product for q, k and v; all rows share the keys and values of the prompt
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

from tinystories.cache import KeyValueCache
from tinystories.fast_cache import PromptCache, RowsCache
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


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y [B, H, T, .] of x [B, H, T, .] and y [B, H, ., .], or y [1, H, ., .] for all rows."""
    if len(y) == len(x):
        return x @ y
    rows = x.transpose(0, 1).flatten(1, 2)  # [H, B T, .]
    return (rows @ y[0]).unflatten(1, (len(x), x.shape[2])).transpose(0, 1)


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T [B, H, T, S]; sums are faster than products where each row has one query."""
    if q.shape[2] == 1 and len(k) == len(q):
        return (q * k).sum(-1)[:, :, None]
    return product(q, k.mT)


def weighted_values(weights: Tensor, v: Tensor) -> Tensor:
    """weights v [B, H, T, D/H] of weights [B, H, T, S] and v [B, H, S, D/H]."""
    if weights.shape[2] == 1 and len(v) == len(weights):
        return (weights.mT * v).sum(2, keepdim=True)
    return product(weights, v)


class PackedAttention(Attention):
    """The same attention, over a history in parts that are never joined."""

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

    def forward(self, x: Tensor, cache: KeyValueCache | RowsCache | None) -> Tensor:
        """[B, T, D] -> [B, T, D]; with a cache, x holds only the new positions."""
        q, k, v = (self.split_heads(y) for y in self.project(x))  # [B, H, T, D/H]
        parts = [(k, v)] if cache is None else cache.parts(self.layer, k, v)
        scores = torch.cat([attention_scores(q, keys) for keys, _ in parts], -1)  # [B, H, T, S]
        queries, seen = scores.shape[2:]
        is_outside = self.window is not None and seen > self.window
        if queries > 1 or is_outside:  # else a single query sees every key
            scores.masked_fill_(self.mask(queries, seen, x.device), float("-inf"))
        sizes = [keys.shape[2] for keys, _ in parts]
        weights = scores.softmax(-1).split(sizes, -1)  # [B, H, T, S] in parts
        mixed = weighted_values(weights[0], parts[0][1])  # [B, H, T, D/H]
        for part_weights, (_, values) in zip(weights[1:], parts[1:], strict=True):
            mixed = mixed + weighted_values(part_weights, values)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2).to(x.dtype))


class PackedGPTNeo(GPTNeo):
    """The same language model without gradients; its decoders share the prompt among all rows."""

    def __init__(self, plain: GPTNeo):
        nn.Module.__init__(self)
        self.config = plain.config
        self.wte = plain.wte
        self.wpe = plain.wpe
        self.h = pack(plain.h)
        self.ln_f = plain.ln_f
        self.output = PackedLinear(plain.output_weight)

    def new_cache(self) -> PromptCache:
        """An empty cache."""
        return PromptCache()

    @torch.no_grad()
    def hidden(self, ids: Tensor, cache: KeyValueCache | RowsCache | None = None) -> Tensor:
        """Hidden states after the last LayerNorm [B, T, D] of tokens [B, T] that follow `cache`."""
        return super().hidden(ids, cache)

    @torch.no_grad()
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
