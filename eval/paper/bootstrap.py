"""95 % intervals of toxicity and similarity by resampling whole TSMC runs.

The particles of one run are dependent, so the runs are the units:

    replicate b draws R of the R runs with replacement; m_r counts how often run r was drawn
    toxicity      sum_r m_r t_r / sum_r m_r n_r
    similarity    (|sum_r m_r S_r|^2 - sum_r m_r^2 |S_r|^2 + sum_r m_r (|S_r|^2 - n_r))
                  / the same with n_r in place of S_r

t_r and S_r are the sums of toxicity and of unit sentence vectors over the n_r texts of run r. A run
that was drawn twice adds no pairs with its own copy, which would compare texts with themselves. At
m = 1 the similarity is `eval.scorers.similarity.mean_pairwise_cosine`. Independent samples count as
runs of one text each. Percentiles of few runs give intervals that are too narrow: with 8 runs they
hold the true value in about 87 % of all cases. B replicates, N texts, R runs, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError


def sums_of_runs(group: list[int], values: Tensor) -> Tensor:
    """Sums [R, ...] of values [N, ...] over the texts of each run; `group` numbers their runs."""
    runs, run = torch.tensor(group).unique(return_inverse=True)  # [R], [N]
    zeros = torch.zeros(len(runs), *values.shape[1:], dtype=torch.float64)
    return zeros.index_add(0, run, values.double())


def mean_cosine(times: Tensor, vectors: Tensor, count: Tensor) -> Tensor:
    """Similarity [B] where run r was drawn times[b, r] times: times [B, R], S [R, D], n [R]."""

    def pairs(sizes: Tensor) -> Tensor:  # [R, D] -> [B]
        own = sizes.square().sum(-1)  # [R]
        every = (times @ sizes).square().sum(-1)  # [B]
        return every - times.square() @ own + times @ (own - count)

    return pairs(vectors) / pairs(count[:, None])


def bootstrap(
    toxicity: Tensor, vectors: Tensor, group: list[int], replicates: int, generator: torch.Generator
) -> dict[str, tuple[float, float, float]]:
    """(value, low, high) of toxicity and similarity, from percentiles of the replicates.

    Takes toxicity [N], sentence vectors [N, D] and the number of each text's run. A replicate
    without a pair of texts has no similarity and is left out. InputError for fewer than two texts.
    """
    if len(group) < 2:
        raise InputError(f"the similarity of {len(group)} texts is not defined; sample more")
    count = sums_of_runs(group, torch.ones(len(group)))  # [R]
    scores = sums_of_runs(group, toxicity)  # [R]
    directions = sums_of_runs(group, F.normalize(vectors.double(), dim=-1))  # [R, D]
    runs = len(count)
    drawn = torch.randint(runs, (replicates, runs), generator=generator)  # [B, R]
    drawn = torch.cat([torch.arange(runs)[None], drawn])  # [1 + B, R], first every run once
    ones = torch.ones(drawn.shape, dtype=torch.float64)
    times = torch.zeros_like(ones).scatter_add(1, drawn, ones)
    found = {"toxicity": times @ scores / (times @ count)}
    found["similarity"] = mean_cosine(times, directions, count)
    limits = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return {
        name: (values[0].item(), *values[1:].nanquantile(limits).tolist())
        for name, values in found.items()
    }
