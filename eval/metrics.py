"""What the final table reports of each generation.

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

from eval.run import processes as ranks
from eval.run.directory import RunDirectory
from eval.run.options import RunConfig
from eval.run.setup import Ingredients, Problem
from eval.run.target import Target
from eval.scorers.similarity import mean_pairwise_cosine
from tinystories.errors import InputError
from tsmc import SCHEMES, Population, proposal_log_probs, sample_proposal, tsmc
from tsmc.estimate import Estimate, difference, mean_estimate
from tsmc.proposal import LanguageModel, Twist, sequence_log_probs
from tsmc.sampler import Sigma
from tsmc.steps import Phase
from twist.potential import each_once

Encoder = Callable[[list[str]], Tensor]


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


def score(problem: Problem, tokens: Tensor, group: list[int]) -> Samples:
    """Decode and score sequences tokens [N, T]."""
    texts = problem.potential.texts(tokens)
    toxicity = each_once(problem.toxicity, texts).double().exp()
    return Samples(texts, toxicity, problem.potential(tokens).cpu().double(), group)


def describe(samples: Samples, encode: Encoder) -> dict[str, float]:
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


def draw_model(
    config: RunConfig, model: LanguageModel, count: int, streams: Callable[[int], torch.Generator]
) -> Tensor:
    """Independent samples [N, T] of a bare language model, N = count, `config.rows` at a time."""
    sizes = ranks.chunk_sizes(count, config.rows)

    def work(i: int) -> dict[str, Tensor]:
        return {"tokens": sample_proposal(model, None, sizes[i], streams(i)).tokens}

    return torch.cat([ranks.one_each(step, sizes, work)["tokens"] for step in range(ranks.rounds(len(sizes)))])


def sample_model(
    config: RunConfig,
    model: LanguageModel,
    problem: Problem,
    streams: Callable[[int], torch.Generator],
) -> Samples:
    """Independent samples of a bare language model, decoded and scored."""
    count = config.eval.base_samples
    return score(problem, draw_model(config, model, count, streams), list(range(count)))


def sample_tsmc(
    config: RunConfig,
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    runs: int,
    streams: Callable[[int], torch.Generator],
    phase: Phase,
) -> Population:
    """R = runs independent TSMC runs of K = particles, about `config.rows` particles in memory at a time.

    InputError where every run died: all its particles had weight zero.
    """
    sizes = ranks.chunk_sizes(runs, max(1, config.rows // particles))
    resampling = {"resample": SCHEMES[config.resampling], "ess_threshold": config.ess_threshold}

    def work(i: int) -> dict[str, Tensor]:
        return vars(tsmc(sigma.model, twist, sigma.log_potential, particles, streams(i), runs=sizes[i], **resampling))

    parts: list[dict[str, Tensor]] = []
    for step in phase.steps(ranks.rounds(len(sizes)), parts=parts):
        parts.append(ranks.one_each(step, sizes, work))
        phase.report(ess=parts[-1]["ess"].mean().item())
    population = Population(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    if not bool((population.log_z > -torch.inf).any()):
        words = f"all {runs} runs of {particles} particles ended with weight zero"
        raise InputError(f"{phase}: {words}; raise --particles and --eval-particles, or soften the potential")
    return population


def evaluate_base(config: RunConfig, problem: Problem, given: Ingredients, run: RunDirectory) -> dict:
    """Row `base`: independent samples of p^(0)."""
    samples = sample_model(config, problem.base, problem, config.streams("base", problem.name))
    run.add_samples(samples.rows("base", problem.name))
    return describe(samples, given.encode)


def evaluate_target(problem: Problem, given: Ingredients, run: RunDirectory) -> dict:
    """Row `target`: the exact samples of sigma."""
    target = problem.target
    samples = score(problem, target.tokens, list(range(len(target.tokens))))
    run.add_samples(samples.rows("target", problem.name))
    evidence = {
        "log_z": target.log_z,
        "log_z_std_error": target.log_z_std_error,
        "num_samples": len(target.tokens),
        "num_proposals": target.num_proposals,
    }
    return describe(samples, given.encode) | evidence


def evaluate_generation(
    config: RunConfig, problem: Problem, given: Ingredients, sigma: Sigma, twist: Twist, m: int, run: RunDirectory
) -> dict:
    """The row of generation m: R TSMC runs of K particles, KL(sigma||q), and the bare p^(m) beside them.

    Runs that died have no samples; they are counted.
    """
    particles, runs = config.eval.particles, config.eval.runs
    streams = config.streams("evaluation", m, problem.name)
    population = sample_tsmc(
        config, sigma, twist, particles, runs, streams, run.phase("evaluation", m, problem.name)
    ).alive()
    final = population.samples()  # [R, K, T]
    group = [r for r in range(len(final)) for _ in range(particles)]
    samples = score(problem, final.flatten(0, 1), group)
    run.add_samples(samples.rows(f"generation {m}", problem.name))
    bare = sample_model(config, sigma.model, problem, config.streams("bare model", m, problem.name))
    row = {
        "generation": m,
        **describe(samples, given.encode),
        "log_z_hat_mean": population.log_z.mean().item(),
        "log_z_hat_std": population.log_z.std().item() if len(final) > 1 else 0.0,
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(final),
        "dead_runs": runs - len(final),
        "model_toxicity": bare.toxicity.mean().item(),
        "model_log_phi": bare.log_phi.mean().item(),
        "model_phi_positive": (bare.log_phi > -torch.inf).double().mean().item(),
    }
    if problem.target is not None:
        kl, half_width = kl_target_proposal(sigma.model, twist, problem.base, problem.target)
        row |= {"kl_target_proposal": kl, "kl_half_width": half_width}
    return row
