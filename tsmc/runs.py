"""Large samples drawn in chunks of bounded memory, each chunk from a random stream of its own.

So any process may draw any chunk. R runs, K particles, T tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.interfaces import Twist
from tsmc.moves import move
from tsmc.sampler import Population, Sigma, tsmc

Draw = Callable[[int, torch.Generator], dict[str, Tensor]]
"""draw(size, generator) gives tensors by name, the rows of `size` members of the sample in each."""


def chunk_sizes(total: int, at_once: int) -> list[int]:
    """The sizes of the chunks of a sample of size `total`, at most `at_once` (but 1) each."""
    at_once = max(1, at_once)
    return [min(at_once, total - start) for start in range(0, total, at_once)]


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all chunks, concatenated by name; InputError where there is no chunk."""
    if not parts:
        raise InputError("a sample of size 0 was asked for; ask for at least one")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def in_chunks(
    draw: Draw, total: int, at_once: int, streams: Callable[[int], torch.Generator]
) -> dict[str, Tensor]:
    """A sample of size `total`, at most `at_once` at a time; streams(number) is that of a chunk."""
    sizes = chunk_sizes(total, at_once)
    return joined([draw(size, streams(number)) for number, size in enumerate(sizes)])


def sample_runs(
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    runs: int,
    generator: torch.Generator,
    moves: int = 0,
    **options,
) -> Population:
    """R = runs runs of K = particles with options of `tsmc`, then `moves` moves of each sample."""
    model, log_potential = sigma.model, sigma.log_potential
    population = tsmc(model, twist, log_potential, particles, generator, runs, **options)
    if moves:
        log_phi = population.log_phi.gather(1, population.ancestors).flatten()  # [R K]
        samples = population.samples.flatten(0, 1)  # [R K, T]
        moved = move(sigma, twist, samples, log_phi, moves, generator)
        population.samples = moved.view_as(population.samples)
    return population


def require_alive(population: Population) -> Population:
    """The same population; InputError where every run ended with weight zero."""
    if not population.is_alive().any():
        runs, particles = population.log_weights.shape
        fault = f"all {runs} runs of {particles} particles ended with weight zero"
        raise InputError(f"{fault}; use more particles, or soften the potential")
    return population
