"""The rows of a run's table: Base, Target and the generations, each after one prompt. `eval/metrics.py` defines the columns."""

import torch
from torch import Tensor

from eval.metrics import (
    Samples,
    describe,
    distinct_share,
    energy_floor,
    kl_target_proposal,
    log_mean_z,
    score,
    score_population,
)
from eval.run.setup import Problem
from eval.scorers.similarity import SimilarityScorer
from tsmc.interfaces import Twist
from tsmc.population import Population
from tsmc.sampler import Sigma


def evaluate_base(problem: Problem, tokens: Tensor, encode: SimilarityScorer) -> tuple[dict, Samples]:
    """Row `base`: independent sequences tokens [N, T] of p^(0)."""
    samples = score(tokens, problem.potential, problem.log_toxicity)
    return describe(samples, encode(samples.texts), problem.exact_vectors), samples


def evaluate_target(problem: Problem, encode: SimilarityScorer) -> tuple[dict, Samples]:
    """Row `target`: the exact samples of sigma, whose embeddings the other rows are compared with."""
    exact = problem.exact
    samples = score(exact.tokens, problem.potential, problem.log_toxicity)
    problem.exact_vectors = encode(samples.texts)
    row = describe(samples, problem.exact_vectors) | {
        "energy": energy_floor(problem.exact_vectors, torch.Generator().manual_seed(0)),
        "log_z": exact.log_z,
        "log_z_std_error": exact.log_z_std_error,
        "num_samples": len(exact.tokens),
        "num_proposals": exact.num_proposals,
    }
    return row, samples


def evaluate_generation(
    problem: Problem, sigma: Sigma, twist: Twist, m: int, population: Population, encode: SimilarityScorer
) -> tuple[dict, Samples]:
    """The row of generation m: TSMC runs, and KL(sigma||q). Runs that died have no samples; they are counted."""
    runs, (log_z, log_z_half_width) = len(population.log_z), log_mean_z(population.log_z)
    population = population.alive()
    samples = score_population(population, problem.potential, problem.log_toxicity)
    row = {
        "generation": m,
        **describe(samples, encode(samples.texts), problem.exact_vectors),
        "log_z": log_z,
        "log_z_half_width": log_z_half_width,
        "log_z_hat_mean": population.log_z.mean().item(),
        "log_z_hat_std": population.log_z.std().item() if len(population.log_z) > 1 else 0.0,
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(population.samples),
        "dead_runs": runs - len(population.log_z),
        "num_runs": runs,
    }
    if problem.exact is not None:
        kl, half_width = kl_target_proposal(sigma.model, twist, problem.base, problem.exact)
        row |= {"kl_target_proposal": kl, "kl_half_width": half_width}
    return row, samples
