"""Many independent samples in chunks of bounded memory: runs of the sampler, or sequences of a bare language model.

R runs, K particles, N sequences, T tokens.
"""

from torch import Tensor

from tinystories.errors import InputError
from tsmc.interfaces import LanguageModel, Twist
from tsmc.moves import move_samples
from tsmc.population import Population
from tsmc.resampling import Scheme, multinomial
from tsmc.sampler import Sigma, tsmc
from tsmc.steps import Chunks
from tsmc.trajectories import sample_proposal


def sample_runs(
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    chunks: Chunks,
    resample: Scheme = multinomial,
    ess_threshold: float = 1.0,
    moves: int = 0,
) -> Population:
    """R = chunks.total independent runs of K = particles, each of their samples moved so often (`tsmc.moves`).

    InputError where all runs ended with weight zero.
    """
    for runs, generator in chunks:
        population = tsmc(sigma.model, twist, sigma.log_potential, particles, generator, runs, resample, ess_threshold)
        if moves:
            move_samples(sigma, twist, population, moves, generator)
        chunks.keep(**vars(population))
        chunks.report(ess=population.ess.mean())
    population = Population(**chunks.kept())
    if not population.is_alive().any():
        fault = f"all {chunks.total} runs of {particles} particles ended with weight zero"
        raise InputError(f"{fault}; use more particles, or soften the potential")
    return population


def sample_model(model: LanguageModel, chunks: Chunks) -> Tensor:
    """Independent samples [N, T] of a language model, N = chunks.total."""
    for count, generator in chunks:
        chunks.keep(tokens=sample_proposal(model, None, count, generator).tokens)
    return chunks.kept()["tokens"]
