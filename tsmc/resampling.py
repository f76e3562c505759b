"""Importance weights in log space, and resampling schemes.

    W = softmax(log w),   ESS = 1 / sum_k W_k^2,   evidence gained = log (1/K) sum_k w_k
    ancestors [R, K] = scheme(weights [R, K], generator),   E[# copies of particle k] = K W_k

A run whose weights are all zero (log weight -inf) is dead: its evidence is -inf and its normalised
weights are uniform, so that nothing divides by zero.

Systematic resampling draws one random number instead of K, so the numbers of copies vary less.
Particles of zero weight are never chosen. R independent runs, K particles.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tsmc.categorical import first_above, uniforms

Scheme = Callable[[Tensor, torch.Generator], Tensor]


def normalise(log_weights: Tensor) -> Tensor:
    """Weights that sum to one [..., K]; uniform where all log weights are -inf."""
    alive = log_weights.amax(-1, keepdim=True) > -torch.inf
    return torch.where(alive, log_weights, 0.0).softmax(-1)


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """ESS = 1 / sum_k W_k^2 [...], between 1 and K; 0 for a dead run."""
    ess = 1.0 / normalise(log_weights).square().sum(-1)
    return torch.where(log_weights.amax(-1) > -torch.inf, ess, 0.0)


def log_mean_exp(log_weights: Tensor) -> Tensor:
    """log (1/K) sum_k exp(log_weights_k) [...]: the evidence gained by resampling these weights."""
    return log_weights.logsumexp(-1) - math.log(log_weights.shape[-1])


def invert(weights: Tensor, points: Tensor) -> Tensor:
    """Indices [R, M] where points [R, M] in [0, 1] fall in the cumulative weights [R, K]."""
    cumulative = weights.double().cumsum(-1)
    return first_above(cumulative, points * cumulative[:, -1:])


def multinomial(weights: Tensor, generator: torch.Generator) -> Tensor:
    """K independent draws (the paper's choice)."""
    return invert(weights, uniforms(len(weights), weights.shape[1], generator))


def systematic(weights: Tensor, generator: torch.Generator) -> Tensor:
    """K points 1 / K apart, all moved by the same uniform number."""
    runs, particles = weights.shape
    strata = torch.arange(particles, device=weights.device)
    return invert(weights, (uniforms(runs, 1, generator) + strata) / particles)


SCHEMES = {"multinomial": multinomial, "systematic": systematic}
"""Resampling schemes by name; one of your own is a function and an entry here."""
