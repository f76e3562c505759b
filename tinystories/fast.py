"""Linear layers: y = x W^T + b, the product that nearly all the time of every network here goes into.

PyTorch carries two libraries of matrix products for CPUs and sends float32 to MKL. oneDNN, which it uses for bfloat16,
computes the same float32 products too: on the AMD processor that this was measured on, more than twice as fast
(`python -m eval.bench` measures both). So large products on a CPU go to oneDNN here, gradients included; small ones, other
types and other devices take PyTorch's own way:

    dx = dy W                     [N, I]
    dW = dy^T x,  db = sum dy     [O, I], [O]

With few rows, as when sampling token by token, bringing a weight into the order that oneDNN's kernels read takes as long as
multiplying by it. While `steady_weights` is open that is done once for each weight. N rows, I inputs, O outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST = 2**21  # N I O from which oneDNN's fixed cost is paid back
FEW_ROWS = 256  # up to which a weight is worth keeping in oneDNN's order
HAS_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)

Packed = dict[tuple[int, ...], tuple[tuple[Tensor, ...], Tensor]]
"""Weights by identity: they themselves, kept alive, and all of them as one matrix in oneDNN's order."""
PACKED: ContextVar[Packed | None] = ContextVar("packed", default=None)


@contextmanager
def steady_weights() -> Iterator[None]:
    """A promise that no weight changes while this is open; also a decorator, for functions that keep it."""
    if PACKED.get() is not None:
        yield
        return
    token = PACKED.set({})
    try:
        yield
    finally:
        PACKED.reset(token)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is already that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none", kind: str = "") -> Tensor:
    """x W^T + b [..., O] of x [..., I] and weight [O, I], in any memory layout, without gradients.

    after="gelu" applies a GELU of that kind ("none" or "tanh") while the numbers are still at hand.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], kind)


def packed(kept: Packed, *weights: Tensor) -> Tensor:
    """Weights [O_i, I] one below the other in oneDNN's order, made at their first use."""
    key = tuple(map(id, weights))
    if key not in kept:
        together = weights[0] if len(weights) == 1 else torch.cat(weights)
        kept[key] = weights, torch.ops.mkldnn._reorder_linear_weight(together, FEW_ROWS)
    return kept[key][1]


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
            onednn(grad.T, x.T) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether the product x W^T is one that oneDNN computes faster."""
    known = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    plain = known and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return HAS_ONEDNN and plain and x.numel() * weight.shape[0] >= SMALLEST


def has_few_rows(x: Tensor) -> bool:
    """Whether x [..., I] has so few rows that its weight should be packed."""
    return x.numel() <= FEW_ROWS * x.shape[-1]


def without_gradient(x: Tensor, weight: Tensor, bias: Tensor | None, after: str = "none", kind: str = "") -> Tensor:
    """`onednn` of a product that suits it, by the packed weight where one pays: not for a tensor made for this call alone."""
    kept = PACKED.get()
    if kept is not None and has_few_rows(x) and isinstance(weight, nn.Parameter):
        weight = packed(kept, weight)
    return onednn(x, weight, bias, after, kind)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b [..., O] of x [..., I], weight [O, I] and bias [O], by the faster library."""
    if not suits_onednn(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return without_gradient(x, weight, bias)
    return OneDNN.apply(x.reshape(-1, x.shape[-1]), weight, bias).reshape(*x.shape[:-1], -1)


def linear_gelu(x: Tensor, layer: nn.Linear, approximate: str = "none") -> Tensor:
    """gelu(x W^T + b) [..., O] of x [..., I]: in one pass where no gradient needs what lies between."""
    if suits_onednn(x, layer.weight) and not torch.is_grad_enabled():
        return without_gradient(x, layer.weight, layer.bias, "gelu", approximate)
    return F.gelu(layer(x), approximate=approximate)


def linear_each(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """What each of several layers makes of x [..., I]: one product where they have no bias and can be packed as one."""
    kept = PACKED.get()
    apart = kept is None or torch.is_grad_enabled() or not has_few_rows(x)
    if apart or not all(is_plain(layer) and suits_onednn(x, layer.weight) for layer in layers):
        return [layer(x) for layer in layers]
    joint = packed(kept, *(layer.weight for layer in layers))
    return onednn(x, joint).split([layer.out_features for layer in layers], -1)


class Linear(nn.Linear):
    """A linear layer computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return linear(x, self.weight, self.bias)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a product with its weight and nothing else."""
    return isinstance(layer, Linear) and layer.bias is None
