"""What the final table reports of each generation.

    toxicity     mean of p(toxic | s)                    over the final particles of R independent TSMC runs of K
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

from config import RunConfig
from eval.ingredients import Ingredients
from eval.run import RunDirectory
from eval.similarity import mean_pairwise_cosine
from eval.target import Target
from tsmc import SCHEMES, Population, proposal_log_probs, sample_proposal, tsmc
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.proposal import LanguageModel, Twist, sequence_log_probs
from tsmc.sampler import LogPotential
from twist import TextPotential

Encoder = Callable[[list[str]], Tensor]


@dataclass(frozen=True)
class Samples:
    """Texts with their scores; `group` numbers the TSMC run a text came from."""

    texts: list[str]
    toxicity: Tensor  # [N]
    group: list[int]

    def rows(self, source: str) -> list[dict]:
        """One JSON-ready row a text."""
        rows = zip(self.texts, self.toxicity.tolist(), self.group, strict=True)
        return [{"source": source, "run": group, "toxicity": score, "text": text} for text, score, group in rows]


def score(potential: TextPotential, tokens: Tensor, group: list[int]) -> Samples:
    """Decode and score sequences tokens [N, T]."""
    return Samples(potential.texts(tokens), potential.log_score(tokens).double().exp().cpu(), group)


def describe(samples: Samples, encode: Encoder) -> dict[str, float]:
    """Toxicity with its interval over groups (runs), and similarity, of a set of texts."""
    group = torch.tensor(samples.group)
    means = torch.bincount(group, samples.toxicity) / torch.bincount(group)  # [R]
    return {
        "toxicity": samples.toxicity.mean().item(),
        "toxicity_half_width": mean_estimate(means).half_width(),
        "similarity": mean_pairwise_cosine(encode(samples.texts)),
        "num_sequences": len(samples.texts),
    }


def kl_target_proposal(
    model: LanguageModel, twist: Twist | None, base: LanguageModel, target: Target
) -> tuple[float, float]:
    """KL(sigma||q) in nats and half of its 95 % interval, from exact samples of sigma.

    The interval covers the exact samples and log Z_sigma, taken as independent.
    """
    log_q = torch.cat([proposal_log_probs(model, twist, part)[1] for part in target.tokens.split(256)])  # [N]
    terms = mean_estimate(sequence_log_probs(base, target.tokens) + target.log_phi - log_q)
    kl = difference(terms, Estimate(target.log_z, target.log_z_std_error, target.num_proposals - 1.0))
    return kl.value, kl.half_width()


def distinct_share(tokens: Tensor) -> float:
    """Different sequences over K, mean over runs, of tokens [R, K, T]."""
    return sum(len(run.unique(dim=0)) / len(run) for run in tokens) / len(tokens)


def sample_model(model: LanguageModel, potential: TextPotential, count: int, generator: torch.Generator) -> Samples:
    """Independent samples of a bare language model."""
    tokens = torch.cat(
        [sample_proposal(model, None, min(1000, count - done), generator).tokens for done in range(0, count, 1000)]
    )
    return score(potential, tokens, list(range(count)))


def sample_tsmc(
    model: LanguageModel,
    twist: Twist | None,
    log_potential: LogPotential,
    particles: int,
    runs: int,
    generator: torch.Generator,
    resampling: str,
    ess_threshold: float,
    report: Callable[..., None],
    rows: int = 1000,
) -> Population:
    """R = runs independent TSMC runs of K = particles, at most about `rows` particles in memory at a time."""
    at_once = max(1, rows // particles)
    parts = []
    for done in range(0, runs, at_once):
        count = min(at_once, runs - done)
        parts.append(
            tsmc(
                model,
                twist,
                log_potential,
                particles,
                generator,
                runs=count,
                resample=SCHEMES[resampling],
                ess_threshold=ess_threshold,
            )
        )
        report(done + count, ess=parts[-1].ess.mean().item())
    names = ("tokens", "log_weights", "ancestors", "log_z", "ess")
    return Population(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def evaluate_base(config: RunConfig, given: Ingredients, run: RunDirectory) -> dict:
    """Row `base`: independent samples of p^(0)."""
    generator = config.generator("base")
    samples = sample_model(given.base, given.potential, config.eval.base_samples, generator)
    run.add_samples(samples.rows("base"))
    return describe(samples, given.encode)


def evaluate_target(given: Ingredients, run: RunDirectory) -> dict:
    """Row `target`: the exact samples of sigma."""
    target = given.target
    samples = score(given.potential, target.tokens, list(range(len(target.tokens))))
    run.add_samples(samples.rows("target"))
    evidence = {
        "log_z": target.log_z,
        "log_z_std_error": target.log_z_std_error,
        "num_samples": len(target.tokens),
        "num_proposals": target.num_proposals,
    }
    return describe(samples, given.encode) | evidence


def evaluate_generation(
    config: RunConfig,
    given: Ingredients,
    model: LanguageModel,
    twist: Twist,
    log_potential: LogPotential,
    m: int,
    run: RunDirectory,
) -> dict:
    """The row of generation m: R TSMC runs of K particles, KL(sigma||q), and the bare p^(m) beside them."""
    generator = config.generator("evaluation", m)
    particles, runs = config.eval.particles, config.eval.runs
    with run.progress("evaluation", m, runs) as report:
        sampling = (particles, runs, generator, config.resampling, config.ess_threshold)
        population = sample_tsmc(model, twist, log_potential, *sampling, report)
    final = population.samples()  # [R, K, T]
    group = [r for r in range(runs) for _ in range(particles)]
    samples = score(given.potential, final.flatten(0, 1), group)
    run.add_samples(samples.rows(f"generation {m}"))
    kl, kl_half_width = kl_target_proposal(model, twist, given.base, given.target)
    bare = sample_model(model, given.potential, config.eval.base_samples, generator)
    return {
        "generation": m,
        **describe(samples, given.encode),
        "kl_target_proposal": kl,
        "kl_half_width": kl_half_width,
        "log_z_hat_mean": population.log_z.mean().item(),
        "log_z_hat_std": population.log_z.std().item(),
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(final),
        "model_toxicity": bare.toxicity.mean().item(),
    }
