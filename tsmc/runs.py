"""The phases of an algorithm, and large samples drawn in chunks of bounded memory.

A phase is a function of what is handed to it and of a random stream of its own, so it can be
computed again at any time, and by any process, with the same result. `Phases` simply computes each
phase; `eval/run/run.py` keeps them in files and shows their progress. R runs, K particles.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.interfaces import Report, Twist, ignore
from tsmc.sampler import Population, Sigma, tsmc

Compute = Callable[[torch.Generator, Report], dict[str, Tensor]]
"""compute(generator, report) gives the tensors of a phase by name, reporting its steps."""
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


class Phases:
    """Computes phases, each named by a word and its generation m (None outside of them)."""

    def __init__(self, seed: int = 0, device: str | torch.device = "cpu", rows: int = 1000):
        """`rows` sequences are drawn at a time."""
        self.seed = seed
        self.device = torch.device(device)
        self.rows = rows

    def stream(self, *name: str | int | None) -> torch.Generator:
        """The random stream of a name, such as ("ctl", 1); those of other names are independent."""
        # Hashed, so that streams of neighbouring seeds or phases have nothing in common.
        digest = hashlib.sha256(repr((self.seed, *name)).encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))

    def once(self, phase: str, m: int | None, steps: int, compute: Compute) -> dict[str, Tensor]:
        """The tensors of a phase of so many steps."""
        return compute(self.stream(phase, m), ignore)

    def draw(
        self, phase: str, m: int | None, total: int, draw: Draw, particles: int = 1
    ) -> dict[str, Tensor]:
        """A phase that draws a sample of size `total`, of `particles` sequences each, in chunks."""
        sizes = chunk_sizes(total, self.rows // particles)
        return joined([draw(size, self.stream(phase, m, n)) for n, size in enumerate(sizes)])


def draw_population(
    phases: Phases,
    phase: str,
    m: int | None,
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    runs: int,
    **options,
) -> Population:
    """A phase of R = runs runs of K = particles with options of `tsmc`.

    InputError where every run ended with weight zero.
    """

    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        given = (sigma.model, twist, sigma.log_potential, particles, generator, size)
        return vars(tsmc(*given, log_prefix=sigma.log_prefix, **options))

    population = Population(**phases.draw(phase, m, runs, draw, particles))
    if not population.is_alive().any():
        fault = f"all {runs} runs of {particles} particles ended with weight zero"
        raise InputError(f"{fault}; use more particles, or soften the potential")
    return population
