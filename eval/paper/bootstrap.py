"""Intervals of toxicity and similarity by resampling whole TSMC runs, whose particles depend on each other.

    replicate b draws R of the R runs with replacement; m_r counts how often run r was drawn
    toxicity    sum_r m_r t_r / sum_r m_r n_r
    similarity  (|sum_r m_r S_r|^2 - sum_r m_r^2 |S_r|^2 + sum_r m_r (|S_r|^2 - n_r)) / the same with n_r in place of S_r

t_r, S_r are the sums of toxicity and of unit sentence vectors over the n_r texts of run r. A run that was drawn twice adds
no pairs with its own copy: those would hold every text beside itself, at cosine 1. At m = 1 similarity is
`eval.scorers.similarity.mean_pairwise_cosine`. Independent samples are runs of one text each. The percentiles of few runs cover
too little: about 87 % of the time with 8. B replicates, N texts, R runs, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError


@dataclass(frozen=True)
class RunSums:
    """What the replicates need of R runs."""

    count: Tensor  # [R] n_r
    toxicity: Tensor  # [R] t_r
    vectors: Tensor  # [R, D] S_r


def run_sums(toxicity: Tensor, vectors: Tensor, group: list[int]) -> RunSums:
    """Sums over the texts of each run, from toxicity [N], sentence vectors [N, D] and the number of each text's run."""
    _, run = torch.tensor(group).unique(return_inverse=True)  # [N]
    if len(run) < 2:
        raise InputError(f"{len(run)} texts have no similarity; sample more of them")

    def sums(values: Tensor) -> Tensor:  # [N, ...] -> [R, ...]
        zeros = torch.zeros(int(run.max()) + 1, *values.shape[1:], dtype=torch.float64)
        return zeros.index_add(0, run, values.double())

    return RunSums(sums(torch.ones(len(run))), sums(toxicity), sums(F.normalize(vectors.double(), dim=-1)))


def toxicity_at(sums: RunSums, times: Tensor) -> Tensor:
    """Mean toxicity [B] with run r taken times[b, r] times, times [B, R]."""
    return times @ sums.toxicity / (times @ sums.count)


def similarity_at(sums: RunSums, times: Tensor) -> Tensor:
    """Mean cosine over distinct pairs [B] with run r taken times[b, r] times, times [B, R]."""

    def pairs(sizes: Tensor) -> Tensor:  # [R, D] -> [B]
        own = sizes.square().sum(-1)  # [R]
        return (times @ sizes).square().sum(-1) - times.square() @ own + times @ (own - sums.count)

    return pairs(sums.vectors) / pairs(sums.count[:, None])


def draw_times(runs: int, replicates: int, generator: torch.Generator) -> Tensor:
    """How often each run was drawn, [B, R] float64, rows of sum R; never one run alone where there are several."""
    drawn = torch.randint(runs, (replicates, runs), generator=generator)
    alone = (drawn == drawn[:, :1]).all(1)
    if runs > 1:
        drawn[alone, 0] = (drawn[alone, 0] + 1) % runs
    times = torch.zeros(replicates, runs, dtype=torch.float64)
    return times.scatter_add(1, drawn, torch.ones_like(drawn, dtype=torch.float64))


def interval(at_one: Tensor, replicated: Tensor) -> dict[str, float]:
    """Value and 95 % interval: the limits that leave out 2.5 % of the replicates [B] on either side."""
    low, high = replicated.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"value": at_one.item(), "low": low, "high": high}


def bootstrap(sums: RunSums, replicates: int, generator: torch.Generator) -> dict[str, dict[str, float]]:
    """Toxicity and similarity, each with its 95 % interval (percentiles over replicates)."""
    once = torch.ones(1, len(sums.count), dtype=torch.float64)
    times = draw_times(len(sums.count), replicates, generator)
    return {
        "toxicity": interval(toxicity_at(sums, once), toxicity_at(sums, times)),
        "similarity": interval(similarity_at(sums, once), similarity_at(sums, times)),
    }
