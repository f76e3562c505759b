"""The rows of a run's table: Base, Target and the generations, each after one prompt. `eval/metrics.py` defines the columns."""

import torch
from torch import Tensor

from eval.metrics import Samples, describe, distinct_share, kl_target_proposal, score, score_population
from eval.run.setup import Problem
from eval.scorers.similarity import SimilarityScorer
from tsmc.population import Population
from tsmc.proposal import Twist
from tsmc.sampler import Sigma


def evaluate_texts(problem: Problem, tokens: Tensor, encode: SimilarityScorer) -> tuple[dict, Samples]:
    """The row of independent sequences tokens [N, T], and the texts."""
    samples = score(tokens, problem.potential, problem.log_toxicity)
    return describe(samples, encode), samples


def evaluate_target(problem: Problem, encode: SimilarityScorer) -> tuple[dict, Samples]:
    """Row `target`: the exact samples of sigma."""
    exact = problem.exact
    row, samples = evaluate_texts(problem, exact.tokens, encode)
    row |= {
        "log_z": exact.log_z,
        "log_z_std_error": exact.log_z_std_error,
        "num_samples": len(exact.tokens),
        "num_proposals": exact.num_proposals,
    }
    return row, samples


def evaluate_generation(
    problem: Problem, sigma: Sigma, twist: Twist, m: int, population: Population, bare: Tensor, encode: SimilarityScorer
) -> tuple[dict, Samples]:
    """The row of generation m: TSMC runs, KL(sigma||q), and independent samples [N, T] of the bare p^(m) beside them.

    Runs that died have no samples; they are counted.
    """
    runs, population = len(population.log_z), population.alive()
    samples = score_population(population, problem.potential, problem.log_toxicity)
    of_model = score(bare, problem.potential, problem.log_toxicity)
    row = {
        "generation": m,
        **describe(samples, encode),
        "log_z_hat_mean": population.log_z.mean().item(),
        "log_z_hat_std": population.log_z.std().item() if len(population.log_z) > 1 else 0.0,
        "ess": population.ess.mean().item(),
        "distinct": distinct_share(population.samples()),
        "dead_runs": runs - len(population.log_z),
        "model_toxicity": of_model.toxicity.mean().item(),
        "model_log_phi": of_model.log_phi.mean().item(),
        "model_phi_positive": (of_model.log_phi > -torch.inf).double().mean().item(),
    }
    if problem.exact is not None:
        kl, half_width = kl_target_proposal(sigma.model, twist, problem.base, problem.exact)
        row |= {"kl_target_proposal": kl, "kl_half_width": half_width}
    return row, samples
