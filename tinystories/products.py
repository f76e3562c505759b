"""The product y = x W^T + b, with gradients, by oneDNN where that is faster.

    x [..., I], W [O, I], b [O] -> y [..., O]        dx = dy W,  dW = dy^T x,  db = sum dy

PyTorch multiplies float32 on CPUs with MKL. On the AMD processor that this was measured on, oneDNN
takes less than half the time. Small products, other types and devices use PyTorch's own product. N
rows, I inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 2**21  # N I O from which the fixed cost of a oneDNN call is paid back
HAS_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)

TYPES = [torch.float32]
if HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported():  # not on processors with AVX2 alone
    TYPES.append(torch.bfloat16)


def has_fast_product(weight: Tensor) -> bool:
    """Whether oneDNN can multiply with a weight of this type on this device."""
    return HAS_ONEDNN and weight.dtype in TYPES and weight.device.type == "cpu"


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether the product x W^T is large enough, and of a type, that oneDNN computes faster."""
    is_alike = has_fast_product(weight) and x.dtype == weight.dtype
    is_large = x.numel() * weight.shape[0] >= SMALLEST
    return is_alike and is_large and not torch.is_autocast_enabled("cpu")


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: str = "") -> Tensor:
    """x W^T + b [..., O] by oneDNN, without gradients; `gelu` "none" or "tanh" appends it."""
    after = "gelu" if gelu else "none"
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, after, [], gelu)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dy^T x [O, I] of dy [N, O] and x [N, I]; oneDNN copies the left side: the narrower one."""
    if grad.shape[1] > x.shape[1]:
        return onednn(x.T, grad.T).T.contiguous()
    return onednn(grad.T, x.T)


class OneDNNProduct(torch.autograd.Function):
    """x W^T + b with its gradients; x is [N, I]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, I] -> [N, O]"""
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dy [N, O] -> dx, dW and db, each where it is needed."""
        x, weight = ctx.saved_tensors
        # oneDNN takes a thousand times longer for an expanded gradient, or a slice of wider rows
        grad = grad.contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            onednn(grad, weight.T) if needs_x else None,
            weight_gradient(grad, x.contiguous()) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b [..., O] of x [..., I], weight [O, I] and bias [O], by the faster library."""
    if not suits_onednn(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return onednn(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # [N, I]
    return OneDNNProduct.apply(rows, weight, bias).reshape(*x.shape[:-1], -1)
