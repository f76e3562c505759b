"""Resampling schemes: plain functions of normalised weights and a generator.

    ancestors [R, K] = scheme(weights [R, K], generator),   E[# copies of particle k] = K W_k

Each but the first draws fewer or more evenly spread random points than K independent ones, so the numbers of copies vary
less. Particles of zero weight are never chosen and ancestors are always in range. R runs, K particles.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tsmc.categorical import first_above, uniforms, widest

Scheme = Callable[[Tensor, torch.Generator], Tensor]


def invert(weights: Tensor, points: Tensor) -> Tensor:
    """Indices [R, M] where points [R, M] in [0, 1] fall in the cumulative sum of weights [R, K], of any scale."""
    cumulative = weights.to(widest(weights.device)).cumsum(-1)
    return first_above(cumulative, points * cumulative[:, -1:])


def multinomial(weights: Tensor, generator: torch.Generator) -> Tensor:
    """K independent draws (the paper's choice)."""
    return invert(weights, uniforms(*weights.shape, generator))


def stratified(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One uniform point in each of the K intervals of length 1 / K."""
    strata = torch.arange(weights.shape[1], device=weights.device)
    return invert(weights, (uniforms(*weights.shape, generator) + strata) / weights.shape[1])


def systematic(weights: Tensor, generator: torch.Generator) -> Tensor:
    """K points 1 / K apart, all moved by the same uniform number."""
    strata = torch.arange(weights.shape[1], device=weights.device)
    return invert(weights, (uniforms(weights.shape[0], 1, generator) + strata) / weights.shape[1])


def residual(weights: Tensor, generator: torch.Generator) -> Tensor:
    """floor(K W_k) certain copies of every particle; the places left are drawn from the fractions K W_k - floor(K W_k)."""
    particles = weights.shape[1]
    weights = weights.to(widest(weights.device))
    expected = particles * weights / weights.sum(-1, keepdim=True)  # [R, K]
    rounding = 64 * torch.finfo(expected.dtype).eps  # whole numbers stay whole despite that of 1 / K
    copies = (expected * (1 + rounding)).floor()
    drawn = invert((expected - copies).clamp(min=0.0), uniforms(*weights.shape, generator))
    ends = copies.cumsum(-1)  # place i holds a copy of the first particle whose copies end behind i
    places = torch.arange(particles, dtype=ends.dtype, device=ends.device).expand_as(ends).contiguous()
    return torch.where(places < ends[:, -1:], first_above(ends, places), drawn)


SCHEMES: dict[str, Scheme] = {
    "multinomial": multinomial,
    "stratified": stratified,
    "systematic": systematic,
    "residual": residual,
}
