"""The columns of the table: what a set of samples is worth.

    toxicity     mean of p(toxic | s)                    over the final particles of R independent TSMC runs of K
    log phi      mean; phi > 0: share of the texts that the potential does not rule out
    similarity   mean cosine over distinct index pairs    of the same R K texts
    KL(sigma||q) = E_sigma[log p^(0)(s) + log phi(s) - log q(s)] - log Z_sigma,   exact samples of sigma
    log Z-hat    mean and standard deviation over runs, against log Z_sigma
    ESS          of the weights at t = T, before the last resampling, mean over runs
    distinct     share of different sequences among a run's K final particles, mean over runs

Particles that are copies of each other count as often as they occur, in toxicity and in similarity: they are what the
sampler returns. Particles of one run are dependent, so intervals come from whole runs. Intervals are 95 %.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.scorers.similarity import mean_pairwise_cosine
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.population import Population
from tsmc.proposal import LanguageModel, Twist
from tsmc.rejection import ExactSamples
from tsmc.scoring import proposal_log_probs, sequence_log_probs
from twist.potential import TextPotential, each_once


@dataclass(frozen=True)
class Samples:
    """Texts with their scores; `group` numbers the TSMC run a text came from."""

    texts: list[str]
    toxicity: Tensor  # [N]
    log_phi: Tensor  # [N]
    group: list[int]

    def rows(self, source: str, prompt: str = "") -> list[dict]:
        """One JSON-ready row a text; `prompt` names all prompts of a run but the first."""
        rows = zip(self.group, self.toxicity.tolist(), self.log_phi.tolist(), self.texts, strict=True)
        names = ("run", "toxicity", "log_phi", "text")
        return [{"source": source, "prompt": prompt} | dict(zip(names, row, strict=True)) for row in rows]


def score(
    tokens: Tensor,
    potential: TextPotential,
    log_toxicity: Callable[[list[str]], Tensor],
    group: list[int] | None = None,
) -> Samples:
    """Decode and score sequences tokens [N, T]; without groups each text is one of its own."""
    texts = potential.texts(tokens)
    toxicity = each_once(log_toxicity, texts).double().exp()
    log_phi = potential(tokens).cpu().double()
    return Samples(texts, toxicity, log_phi, list(range(len(texts))) if group is None else group)


def score_population(
    population: Population, potential: TextPotential, log_toxicity: Callable[[list[str]], Tensor]
) -> Samples:
    """The final samples of R runs, each run a group."""
    final = population.samples()  # [R, K, T]
    group = [run for run in range(len(final)) for _ in range(final.shape[1])]
    return score(final.flatten(0, 1), potential, log_toxicity, group)


def describe(samples: Samples, encode: Callable[[list[str]], Tensor]) -> dict[str, float]:
    """Toxicity and log phi with their intervals over groups (runs), and similarity, of a set of texts."""
    group = torch.tensor(samples.group)

    def half_width(values: Tensor) -> float:
        return mean_estimate(torch.bincount(group, values) / torch.bincount(group)).half_width()

    return {
        "toxicity": samples.toxicity.mean().item(),
        "toxicity_half_width": half_width(samples.toxicity),
        "log_phi": samples.log_phi.mean().item(),
        "log_phi_half_width": half_width(samples.log_phi),
        "phi_positive": (samples.log_phi > -torch.inf).double().mean().item(),
        "similarity": mean_pairwise_cosine(encode(samples.texts)),
        "num_sequences": len(samples.texts),
    }


def kl_target_proposal(
    model: LanguageModel, twist: Twist | None, base: LanguageModel, exact: ExactSamples
) -> tuple[float, float]:
    """KL(sigma||q) in nats and half of its 95 % interval, from exact samples of sigma.

    The interval covers the exact samples and log Z_sigma, taken as independent.
    """
    log_q = torch.cat([proposal_log_probs(model, twist, rows)[1] for rows in exact.tokens.split(256)])  # [N]
    terms = mean_estimate(sequence_log_probs(base, exact.tokens) + exact.log_phi - log_q)
    kl = difference(terms, Estimate(exact.log_z, exact.log_z_std_error, exact.num_proposals - 1.0))
    return kl.value, kl.half_width()


def distinct_share(tokens: Tensor) -> float:
    """Different sequences over K, mean over runs, of tokens [R, K, T]."""
    return sum(len(run.unique(dim=0)) / len(run) for run in tokens) / len(tokens)
