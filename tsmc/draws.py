"""Importance weights in log space, resampling schemes, and draws of tokens.

    W = softmax(log w),   ESS = 1 / sum_k W_k^2,   evidence gained = log (1/K) sum_k w_k
    ancestors [R, K] = scheme(weights [R, K], generator),   E[# copies of particle k] = K W_k
    tokens_n ~ softmax(logits_n),   log_normaliser_n = log sum_v exp(logits_nv)

Everything is drawn by inverting a cumulative distribution at uniform numbers. A run whose weights
are all zero (log weight -inf) is dead: its evidence is -inf and its normalised weights are uniform,
so that nothing divides by zero. What has zero weight is never drawn, whatever rounding does.

Each row has a uniform number of its own, so its token does not depend on what is drawn beside it.
Tokens are found on two levels: the block of 64 that the uniform falls into, then the token inside
it. Sums across blocks are in float64, so that rounding does not change a block's frequency however
large V is; inside a block, a token with less than 1e-7 of the block's weight may never be drawn. R
runs, K particles, N rows, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 64
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


def first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Index [N, M] of the first entry of cumulative [N, V] above threshold [N, M], always below V.

    An entry that adds nothing is never chosen, wherever rounding carries the threshold.
    """
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())  # reaches the total
    index = torch.searchsorted(cumulative, threshold.clamp(min=0.0), right=True)
    return torch.minimum(index, last).clamp(max=cumulative.shape[-1] - 1)  # NaN has no order at all


def uniforms(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Uniform numbers [rows, columns], float64 on the generator's device."""
    options = {"dtype": torch.float64, "device": generator.device, "generator": generator}
    return torch.rand(rows, columns, **options)


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


def draw_categorical(logits: Tensor, uniform: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [N] and log normalisers [N] at uniform numbers [N, 1] in [0, 1).

    Row n draws from row place[n] of logits [S, V]. A row of nothing but -inf gives token 0 and
    normaliser -inf.
    """
    size = logits.shape[1]
    width = min(BLOCK, size)
    peak = logits.amax(-1)  # [S]
    weights = logits.softmax(-1)  # [S, V]; NaN in a row of nothing but -inf
    whole = size - size % width
    totals = weights[:, :whole].unflatten(1, (-1, width)).sum(-1)  # [S, V / 64]
    if whole < size:
        totals = torch.cat([totals, weights[:, whole:].sum(-1, keepdim=True)], 1)
    totals = totals.double()
    cumulative = totals.cumsum(-1)
    before = (cumulative - totals)[place]  # [N, V / 64] the weight of all earlier blocks
    cumulative = cumulative[place]  # [N, V / 64]
    threshold = uniform * cumulative[:, -1:]  # [N, 1]
    block = first_above(cumulative, threshold)  # [N, 1]
    members = block * width + torch.arange(width, device=block.device)  # [N, 64]
    inside = weights[place[:, None], members.clamp(max=size - 1)]  # [N, 64]
    inside = inside.masked_fill_(members >= size, 0).to(totals.dtype).cumsum(-1)
    offset = first_above(inside, threshold - before.gather(1, block))  # [N, 1]
    tokens = (block * width + offset).clamp(max=size - 1).squeeze(1)  # [N]
    log_normaliser = peak - weights.amax(-1).log()  # the largest weight is exp(peak) / normaliser
    is_dead = peak == -torch.inf  # [S]
    log_normaliser = log_normaliser.masked_fill(is_dead, -torch.inf)
    return tokens.masked_fill(is_dead[place], 0), log_normaliser[place]
