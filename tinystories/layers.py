"""What all networks here share.

    y = gelu(x W^T + b)         x [..., I], W [O, I], b [O], y [..., O]

In a network of a narrower type, attention, logits and log-probabilities are still computed in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is already that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LinearGELU(nn.Linear):
    """A linear layer followed by GELU, exact ("none") or in its tanh approximation ("tanh")."""

    def __init__(self, in_features: int, out_features: int, approximate: str = "none", **options):
        super().__init__(in_features, out_features, **options)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return F.gelu(super().forward(x), approximate=self.approximate)
