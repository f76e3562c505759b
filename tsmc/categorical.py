"""Draws from N categorical distributions by inverting their cumulative distributions.

    tokens_n ~ softmax(logits_n),   log_normaliser_n = log sum_v exp(logits_nv)

Each row has a uniform number of its own, so its token does not depend on what is drawn beside it.
The inversion has two levels: the block of 64 categories that the uniform falls into, then the
category inside it. Sums across blocks are in float64, so that rounding does not change a block's
frequency however large V is; inside a block, a category with less than 1e-7 of the block's weight
may never be drawn. One of zero weight is never drawn. N rows, V categories.
"""

import torch
from torch import Tensor

BLOCK = 64


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


def draw_categorical(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [N] and log normalisers [N] of logits [N, V] at uniform numbers [N, 1] in [0, 1).

    A row of nothing but -inf gives token 0 and normaliser -inf.
    """
    size = logits.shape[1]
    width = min(BLOCK, size)
    peak = logits.amax(-1)  # [N]
    weights = logits.softmax(-1)  # [N, V]; NaN in a row of nothing but -inf
    whole = size - size % width
    totals = weights[:, :whole].unflatten(1, (-1, width)).sum(-1)  # [N, V / 64]
    if whole < size:
        totals = torch.cat([totals, weights[:, whole:].sum(-1, keepdim=True)], 1)
    totals = totals.double()
    cumulative = totals.cumsum(-1)
    before = cumulative - totals  # [N, V / 64] the weight of all earlier blocks
    threshold = uniform * cumulative[:, -1:]  # [N, 1]
    block = first_above(cumulative, threshold)  # [N, 1]
    members = block * width + torch.arange(width, device=block.device)  # [N, 64]
    inside = weights.gather(1, members.clamp(max=size - 1))  # [N, 64]
    inside = inside.masked_fill_(members >= size, 0).to(totals.dtype).cumsum(-1)
    offset = first_above(inside, threshold - before.gather(1, block))  # [N, 1]
    tokens = (block * width + offset).clamp(max=size - 1).squeeze(1)  # [N]
    log_normaliser = peak - weights.amax(-1).log()  # the largest weight is exp(peak) / normaliser
    is_dead = peak == -torch.inf
    return tokens.masked_fill(is_dead, 0), log_normaliser.masked_fill(is_dead, -torch.inf)
