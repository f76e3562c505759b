"""The same networks, computed faster: `accelerate(model)` changes the class of every layer that has a fast version.

Weights and their names stay, and so do results, up to rounding. The fast layers are tested against the plain ones.

    linear layers   x W^T + b by oneDNN instead of MKL, PyTorch's own choice for float32 on CPUs: more than twice as
                    fast on the AMD processor that this was measured on (`python -m eval.bench`). Gradients too:
                        dx = dy W  [N, I],   dW = dy^T x  [O, I],   db = sum dy  [O]
    packing         a weight is brought into the order that oneDNN reads once, and again when it has changed, not at every
                    product: for few rows that takes as long as the product itself. The weight is held twice from then on
    attention       one product for q, k and v; no row has a copy of a shared prompt (`tinystories/fast_cache.py`)

Small products, other types and other devices take PyTorch's own way. N rows, I inputs, O outputs, B batch, T new
positions, S positions seen, H heads, D width, V vocabulary.
"""

import ctypes
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from tinystories.fast_cache import PartsCache, RowsCache
from tinystories.gpt_neo import Attention, GPTNeo
from tinystories.layers import LinearGELU, at_least_float32

SMALLEST = 2**21  # N I O from which oneDNN's fixed cost is paid back
ROWS = 256  # of the products that a packed weight is laid out for; with more it serves as well
HAS_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)


def accelerate(model: nn.Module) -> nn.Module:
    """The same model, its layers now of their fast classes. It is saved, loaded into, copied and trained as ever."""
    for module in model.modules():
        if type(module) in FAST:
            module.__class__ = FAST[type(module)]
    return model


class Packed(NamedTuple):
    """Weights as one matrix in oneDNN's order, and what they were when it was made."""

    state: list[tuple]
    storages: list[torch.UntypedStorage]  # kept alive, so that no later tensor is taken for one of them
    matrix: Tensor


PACKED = WeakIdKeyDictionary()
"""From a weight, the first where there are several, to its `Packed`; entries go when the weight goes."""


def packed(*weights: nn.Parameter) -> Tensor:
    """Weights [O_i, I], one below the other, in oneDNN's order: made when first asked for and when one has changed.

    A change is another place in memory, type or layout, or a step of the counter by which autograd sees writes in
    place. That covers optimisers, load_state_dict, copy_, `.to` and an assignment to `.data`. What it cannot see are
    writes in place through `.data` (w.data.mul_(2)) or from outside PyTorch (a NumPy array of the same memory): call
    PACKED.clear() after those.
    """
    state = [(weight.data_ptr(), weight._version, weight.dtype, weight.stride()) for weight in weights]
    kept = PACKED.get(weights[0])
    if kept is None or kept.state != state:
        together = weights[0] if len(weights) == 1 else torch.cat(weights)
        matrix = torch.ops.mkldnn._reorder_linear_weight(together.detach(), ROWS)
        kept = PACKED[weights[0]] = Packed(state, [weight.untyped_storage() for weight in weights], matrix)
    return kept.matrix


def forget_fused(optimizer: torch.optim.Optimizer, *_) -> None:
    """Called after the steps of all optimisers: the fused ones write without counting."""
    if any(group.get("fused") for group in optimizer.param_groups):
        PACKED.clear()


register_optimizer_step_post_hook(forget_fused)


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether the product x W^T is one that oneDNN computes faster."""
    known = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    plain = known and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return HAS_ONEDNN and plain and x.numel() * weight.shape[0] >= SMALLEST


def suits_packing(weight: Tensor) -> bool:
    """Whether the weight is one that lasts and counts writes."""
    return isinstance(weight, nn.Parameter) and not weight.is_inference()


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", kind: str = "") -> Tensor:
    """x W^T + b [..., O] of x [..., I] and weight [O, I], in any memory layout, without gradients.

    after="gelu" applies a GELU of that kind ("none" or "tanh") while the numbers are still at hand.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], kind)


def product_over_rows(x: Tensor, y: Tensor) -> Tensor:
    """x^T y [A, B] of x [N, A] and y [N, B]; oneDNN copies its transposed left side, so that is the narrower."""
    if x.shape[1] > y.shape[1]:
        return onednn(y.T, x.T).T.contiguous()
    return onednn(x.T, y.T)


class OneDNN(torch.autograd.Function):
    """The same product with its gradients; x is [N, I]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, I] -> [N, O]"""
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dy [N, O] -> dx, dW, db, each where it is asked for."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            onednn(grad, weight.T) if needs_x else None,
            product_over_rows(grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: str | None = None) -> Tensor:
    """x W^T + b [..., O] of x [..., I], weight [O, I], bias [O], by the faster library; then a GELU of kind `gelu`."""
    suits = suits_onednn(x, weight)
    if suits and not torch.is_grad_enabled():
        weight = packed(weight) if suits_packing(weight) else weight
        return onednn(x, weight, bias) if gelu is None else onednn(x, weight, bias, "gelu", gelu)
    if suits:
        y = OneDNN.apply(x.reshape(-1, x.shape[-1]), weight, bias).reshape(*x.shape[:-1], -1)
    else:
        y = F.linear(x, weight, bias)
    return y if gelu is None else F.gelu(y, approximate=gelu)


class FastLinear(nn.Linear):
    """A linear layer computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return linear(x, self.weight, self.bias)


class FastLinearGELU(LinearGELU):
    """A linear layer with GELU: one pass where no gradient needs what lies between."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return linear(x, self.weight, self.bias, gelu=self.approximate)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y [B, H, T, .] of x [B, H, T, .] and y [B, H, ., .] or [1, H, ., .], which goes over all rows at once."""
    if len(y) == len(x):
        return x @ y
    return (x.transpose(0, 1).flatten(1, 2) @ y[0]).unflatten(1, (len(x), x.shape[2])).transpose(0, 1)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """q k^T [B, H, T, S]. Where each row has one query and its own keys, sums are faster than products so thin."""
    thin = q.shape[2] == 1 and len(k) == len(q)
    return (q * k).sum(-1)[:, :, None] if thin else product(q, k.mT)


def mixture_of(weights: Tensor, v: Tensor) -> Tensor:
    """weights v [B, H, T, D/H] of weights [B, H, T, S] and v [B, H, S, D/H]."""
    thin = weights.shape[2] == 1 and len(v) == len(weights)
    return (weights.mT * v).sum(2, keepdim=True) if thin else product(weights, v)


class FastAttention(Attention):
    """The same attention, over a history in parts that are never joined."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each [B, T, D]: one product where their weights can be packed as one."""
        layers = self.q_proj, self.k_proj, self.v_proj
        joint = not torch.is_grad_enabled() and all(
            type(layer) is FastLinear and suits_onednn(x, layer.weight) and suits_packing(layer.weight)
            for layer in layers
        )
        if not joint:
            return tuple(layer(x) for layer in layers)
        return onednn(x, packed(*(layer.weight for layer in layers))).split(x.shape[-1], -1)

    def forward(self, x: Tensor, cache: PartsCache | RowsCache | None) -> Tensor:
        """[B, T, D] -> [B, T, D]; with a cache, x holds only the new positions."""
        q, k, v = map(self.split_heads, self.project(x))  # [B, H, T, D/H]
        parts = [(k, v)] if cache is None else cache.parts(self.layer, k, v)
        scores = torch.cat([scores_of(q, keys) for keys, _ in parts], -1)  # [B, H, T, S]
        queries, seen = scores.shape[2:]
        if queries > 1 or (self.window is not None and seen > self.window):  # else a single query sees every key
            scores.masked_fill_(self.mask(queries, seen, x.device), float("-inf"))
        weights = scores.softmax(-1).split([keys.shape[2] for keys, _ in parts], -1)
        first, *others = (mixture_of(w, values) for w, (_, values) in zip(weights, parts, strict=True))
        mixed = sum(others, first)  # [B, H, T, D/H]
        return self.out_proj(mixed.transpose(1, 2).flatten(-2).to(x.dtype))


class FastGPTNeo(GPTNeo):
    """The same model: its head by `linear`, its cache in parts."""

    def new_cache(self) -> PartsCache:
        """An empty cache."""
        return PartsCache()

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], float32 or wider, of hidden states [..., D]."""
        return at_least_float32(linear(hidden, self.output_weight))


FAST = {nn.Linear: FastLinear, LinearGELU: FastLinearGELU, Attention: FastAttention, GPTNeo: FastGPTNeo}


def keep_freed_memory() -> None:
    """Let malloc keep the pages of freed tensors; does nothing where the C library is not glibc. No result changes.

    glibc hands every large tensor back to the system when it is freed, and the next step pays for fresh zeroed pages: a
    third of the time of a training step here.
    """
    trim_threshold, mmap_max = -1, -4  # names and numbers of <malloc.h>
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
