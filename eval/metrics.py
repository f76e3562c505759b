"""The columns of the table: what a set of samples is worth.

    log phi      mean over the final particles of R independent TSMC runs of K
    phi > 0      share of the texts that the potential does not rule out
    toxicity     mean of p(toxic | s), where the potential reads the classifier
    ended        share of the texts that have the token --end; the others are cut at T
    similarity   mean cosine over distinct index pairs of the same R K texts
    energy       2 E|x - y| - E|x - x'| - E|y - y'|: energy distance of sentence embeddings, texts x
                 against exact samples y of sigma; zero where both come from the same distribution.
                 In Target's row what 95 % of exact samples of the size of a row would stay below
    KL(sigma||q) = E_sigma[log p^(0)(s) + log phi(s) - log q(s)] - log Z_sigma, by exact samples
    log Z        log of the mean of Z-hat over all runs, dead ones counting zero; of Base and
                 Target that of phi over draws of p^(0), with its 95 % interval
    log Z-hat    of one run: mean and standard deviation over the runs that are alive. The mean is
                 at most log Z_sigma in expectation where no run can die
    ESS          of the weights at t = T, before the last resampling, mean over runs
    distinct     share of different sequences among a run's K samples, mean over runs
    dead         runs whose weights were all zero at some step

Samples are the particles after the last resampling, where copies count as often as they occur.
Particles of one run are dependent, so the energy distance leaves out their pairs.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tsmc.estimate import Estimate


@dataclass(frozen=True)
class ScoredTexts:
    """Texts with their scores; `group` numbers the TSMC run a text came from."""

    texts: list[str]
    scores: dict[str, Tensor]  # "log_phi" [N], and "toxicity" [N] where it is known
    group: list[int]

    def rows(self, source: str) -> list[dict]:
        """One row for each text, ready for JSON."""
        rows = []
        for n, text in enumerate(self.texts):
            scores = {name: values[n].item() for name, values in self.scores.items()}
            rows.append({"source": source, "run": self.group[n], **scores, "text": text})
        return rows


def pair_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j| [N, M] float64 of vectors x [N, D], y [M, D]."""
    return torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist")


def energy_distance(x: Tensor, y: Tensor, group: Tensor) -> float:
    """Energy distance of the distributions of x [N, D] and y [M, D] (Szekely & Rizzo, 2013).

    Pairs of x in the same `group` [N] are left out, for they may depend on each other.
    """
    within_x = pair_distances(x, x)[group[:, None] != group].mean().item()
    within_y = pair_distances(y, y).sum().item() / (len(y) * (len(y) - 1))  # the diagonal is zero
    return 2 * pair_distances(x, y).mean().item() - within_x - within_y


def energy_floor(y: Tensor, n: int) -> float:
    """The 95 % quantile of the energy distance of n exact samples from the exact samples y [M, D].

    It is that between S = 3000 random halves of y, carried over to sizes n and M: between samples
    of one distribution, the distance has the same law but for a factor of 1/n + 1/M.
    """
    count, half = len(y), len(y) // 2
    distances = pair_distances(y, y).cpu()  # [M, M]
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(3000, count, generator=generator).argsort(1)  # [S, M]
    is_first = (order < half).double()  # [S, M]
    sums = is_first @ distances  # [S, M] from each text to the first half
    within = (sums * is_first).sum(1)  # [S] over ordered pairs of the first half
    between = sums.sum(1) - within  # [S]
    rest = distances.sum() - within - 2 * between  # [S] over ordered pairs of the other half
    other = count - half
    energies = 2 * between / (half * other)
    energies -= within / (half * (half - 1)) + rest / (other * (other - 1))
    return energies.quantile(0.95).item() * (1 / n + 1 / count) / (1 / half + 1 / other)


def describe(samples: ScoredTexts, vectors: Tensor, exact_vectors: Tensor | None = None) -> dict:
    """Columns of texts with embeddings [N, D]; [M, D] are those of exact samples, if any."""
    row = {"phi_positive": (samples.scores["log_phi"] > -torch.inf).double().mean().item()}
    for name, values in samples.scores.items():
        row[name] = values.mean().item()
    row["similarity"] = mean_pairwise_cosine(vectors)
    group = torch.tensor(samples.group, device=vectors.device)
    if exact_vectors is not None and group[0] != group[-1]:  # else no two texts are independent
        row["energy"] = energy_distance(vectors, exact_vectors, group)
    return row


def mean_pairwise_cosine(vectors: Tensor) -> float:
    """Mean cosine over the pairs i != j of vectors [N, D], N > 1."""
    count = vectors.shape[0]
    unit = F.normalize(vectors.double(), dim=-1)  # [N, D]
    # The sum over all pairs is |sum_i e_i|^2.
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


def missing_part(found: Estimate, base: Estimate) -> str:
    """A line where log Z of a generation lies so far below that of Base that a quarter of sigma is
    missing, whatever the errors of both, or "".

    Such runs may agree with each other, and then every other column looks perfect. The intervals
    of skewed weights hold a little less often than they say, hence a quarter and not anything.
    """
    lost = base.value - base.half_width() - (found.value + found.half_width())
    if not lost > math.log(4 / 3):
        return ""
    fault = f"log Z {found.value:.2f} of the runs lies below {base.value:.2f} of the row Base: "
    fault += "they miss a quarter of sigma or more"
    return f"{fault}; lower the learning rates, or draw more"
