"""What a set of samples is worth: the columns of the table, and how their numbers are made.

Samples are the particles after the last resampling, where copies count as often as they occur.
Particles of one run are dependent, so the energy distance leaves out their pairs. N texts, M exact
samples of sigma, D width of an embedding, R runs of K particles.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tsmc.draws import log_mean_exp, normalise
from tsmc.estimate import Estimate, log_mean_estimate
from tsmc.sampler import Population


@dataclass(frozen=True)
class Column:
    """A number of a row as tables and figures show it; above each is what it means."""

    key: str
    title: str
    form: str
    better: str = "nearer to Target"


KL = "kl_target_proposal"
COLUMNS = (  # of a job's table, in its order
    # The mean of p(toxic | s), where the potential reads the classifier. Texts may all be alike.
    Column("toxicity", "toxicity", ".3f"),
    Column("log_phi", "log phi", ".2f"),
    # The share of texts that the potential does not rule out.
    Column("phi_positive", "phi > 0", ".3f"),
    # The share of texts that have a token --end; the others are cut at T.
    Column("ended", "ended", ".3f"),
    # The mean cosine of the embeddings of two texts. To distil few distinct texts raises it.
    Column("similarity", "similarity", ".3f"),
    # 2 E|x - y| - E|x - x'| - E|y - y'|, the energy distance of embeddings of texts x and exact
    # samples y: a squared distance, zero where both have one distribution, that hardly sees phi.
    # Target has what 95 % of rows of as many independent texts would stay below. The noise of a row
    # of runs is larger, because the texts of a run depend on each other.
    Column("energy", "energy", ".3f"),
    # KL(sigma||q) = E_sigma[log p^(0) + log phi - log q] - log Z_sigma in nats by exact samples, of
    # Base KL(sigma||p), with its 95 % interval. It is that of the proposal: weights repair a part.
    Column(KL, "KL", ".2f", "lower"),
    # The log of the mean of Z-hat over all runs, where dead ones count zero; of Base and Target
    # that of phi over draws of p^(0). It and its 95 % interval miss what no run has met.
    Column("log_z", "log Z", ".2f"),
    # The mean and the standard deviation of log Z-hat over the runs that are alive. Where no run
    # can die, the mean is at most log Z_sigma in expectation.
    Column("log_z_hat_mean", "log Z-hat", ".2f"),
    Column("log_z_hat_std", "(spread)", ".2f", "lower"),
    # Means over runs: the effective sample size at T, before the last resampling, and the share of
    # different texts among the K samples. Particles that count may share their beginnings.
    Column("ess", "ESS", ".1f", "higher"),
    Column("distinct", "distinct", ".2f", "higher"),
    # Runs whose weights were all zero at some step.
    Column("dead_runs", "dead", ".1f", "lower"),
)
FURTHER = (  # which only a study shows
    Column("kl_target_model", "KL(sigma, p^(m))", ".2f", "lower"),  # without its twist
    # KL(sigma||law of a sample) of runs that resample at T alone: what weights repair is in it.
    Column("kl_samples", "KL of samples", ".2f", "lower"),
    # By other exact samples, drawn after all tuning.
    Column("kl_fresh", "KL, fresh", ".2f", "lower"),
    # The mean score of a policy's texts in runs of K that are weighted to sigma.
    Column("weighted_score", "score, weighted", ".3f"),
    # Of what line 3 learns from: different texts, and different first five tokens.
    Column("distinct_texts", "distinct texts distilled", ",.0f", "higher"),
    Column("beginnings", "beginnings distilled", ",.0f", "higher"),
    Column("scores", "scores", ",.0f", "lower"),  # texts that phi has scored up to here
    Column("worth", "effective texts per score", ".3f", "higher"),  # 1 / sum W^2 over R K
    Column("core_seconds", "core seconds", ",.0f", "lower"),  # of the whole job up to here
    Column("acceptance_rate", "acceptance rate", ".3%"),  # of rejection
)


def is_row(name: str, row: Any) -> bool:
    """Whether it is a row as it was written: numbers, or null, and the row Target without texts."""
    if not isinstance(row, dict) or (name != "target" and not row.get("examples")):
        return False
    is_known = all(isinstance(text, str) for text in row.get("examples", []))
    values = [row.get(column.key) for column in (*COLUMNS, *FURTHER)]
    return is_known and all(isinstance(value, int | float | None) for value in values)


@dataclass(frozen=True)
class ScoredTexts:
    """Texts with their scores; `group` numbers the TSMC run a text came from."""

    texts: list[str]
    scores: dict[str, Tensor]  # "log_phi" [N], and "toxicity" [N] where it is known
    group: list[int]

    @property
    def score(self) -> Tensor:
        """What the texts are judged by [N]: toxicity where it is known, else log phi."""
        return self.scores.get("toxicity", self.scores["log_phi"])

    def rows(self, source: str) -> list[dict]:
        """The lines of samples.jsonl, a text each; `source` names where the texts are from."""
        rows = []
        for n, text in enumerate(self.texts):
            scores = {name: values[n].item() for name, values in self.scores.items()}
            rows.append({"source": source, "run": self.group[n], **scores, "text": text})
        return rows


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


def population_row(population: Population) -> dict:
    """What the runs say of themselves: evidence, effective sizes, copies. Dead runs have none."""
    runs, particles = population.log_weights.shape
    alive = population.alive()
    log_z = alive.log_z
    distinct = [len(tokens.unique(dim=0)) / particles for tokens in alive.samples]  # [R]
    return {
        "log_z": population.log_mean_z(),
        "log_z_std_error": log_mean_estimate(population.log_z).std_error,
        "log_z_hat_mean": log_z.mean().item(),
        "log_z_hat_std": log_z.std().item() if len(log_z) > 1 else math.nan,
        "ess": alive.ess.mean().item(),
        "distinct": sum(distinct) / len(distinct),
        # Texts of dead runs were scored as well.
        "worth": 1 / alive.shares().square().sum().item() / (runs * particles),
        "dead_runs": runs - len(log_z),
        "num_runs": runs,
    }


def weighted_score(log_weights: Tensor, samples: ScoredTexts) -> float | None:
    """The mean over runs of the mean score by weight, log_weights [R, K]; None if all are dead."""
    score = samples.score.cpu().view_as(log_weights)
    is_alive = (log_weights > -torch.inf).any(1).cpu()  # [R]
    shares = normalise(log_weights.cpu()[is_alive].double())  # [R, K]
    products = shares * score[is_alive].masked_fill(shares == 0, 0.0)  # no 0 * inf
    return products.sum(1).mean().item() if len(shares) else None


def log_law_of_samples(log_w: Tensor, log_weights: Tensor) -> Tensor:
    """log law - log q [N] of texts with log weights log_w [N], where the law is that of a sample of
    a run of K i.i.d. draws from q, and log_weights [R, K] are those of R such runs.

        law(s) = E[sum_k 1(s_k = s) W_k] = K q(s) E[w(s) / (w(s) + w_2 + ... + w_K)]

    Each run gives K - 1 weights beside w(s). The mean over runs makes KL(sigma||law) a little too
    large in expectation (Jensen's inequality), by less than what one run alone would.
    """
    others = log_weights[:, 1:].double().logsumexp(1)  # [R]
    log_shares = -F.softplus(others - log_w.double()[:, None])  # [N, R], 0 where q(s) = 0
    return math.log(log_weights.shape[1]) + log_mean_exp(log_shares)


def mean_pairwise_cosine(vectors: Tensor) -> float:
    """Mean cosine over the pairs i != j of vectors [N, D], N > 1."""
    count = vectors.shape[0]
    unit = F.normalize(vectors.double(), dim=-1)  # [N, D]
    # The sum over all pairs is |sum_i e_i|^2.
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


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


def log_z_of(row: dict) -> Estimate | None:
    """log Z of a row, from its runs or from draws of p^(0), where its error is known."""
    if row.get("log_z") is None or row.get("log_z_std_error") is None:
        return None
    draws = [row[key] for key in ("num_runs", "num_proposals", "num_samples") if key in row]
    return Estimate(row["log_z"], row["log_z_std_error"], draws[0] - 1)


def warning_of(row: dict, ends: dict[str, dict]) -> str:
    """A line where log Z of a generation lies so far below that of the row Target, or else Base, of
    its job that a fifth of sigma is missing, whatever the errors of both, or "".

    Such runs may agree with each other, and then every other column looks perfect. The intervals
    of skewed weights hold a little less often than they say, hence a fifth and not anything.
    """
    name = "target" if "target" in ends else "base"
    found, known = log_z_of(row), log_z_of(ends[name])
    if found is None or known is None:
        return ""
    lost = known.value - found.value - math.hypot(known.half_width(), found.half_width())
    if not lost > math.log(5 / 4):
        return ""
    fault = f"generation {row['generation']}: log Z {found.value:.2f} of the runs lies below "
    fault += f"{known.value:.2f} of the row {name.title()}: they miss a fifth of sigma or more"
    return f"{fault}; lower the learning rates, or draw more"
