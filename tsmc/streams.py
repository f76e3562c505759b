"""Random streams by name, and large samples in chunks of bounded memory.

Whatever draws at random gets a stream of its own, named by a word and its generation, so it gives
the same numbers whenever and wherever it is computed: after a resume, or in any process of a job
(`tsmc/processes.py`). R runs, K particles, N rows.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsmc import processes
from tsmc.sampler import Population, Rule, Twist, tsmc
from tsmc.sigma import Sigma

Draw = Callable[[int, torch.Generator], Any]  # (size, generator) -> an object of tensors


class Streams:
    """Random streams, each named by a word and its generation m (None outside of them)."""

    def __init__(self, seed: int = 0, device: str | torch.device = "cpu", rows: int = 1000):
        """`rows` sequences are drawn at a time."""
        self.seed = seed
        self.device = torch.device(device)
        self.rows = rows

    def stream(self, *name: str | int | None) -> torch.Generator:
        """The random stream of a name, as ("sampling", 1); those of other names are independent."""
        # Hashed, so that streams of neighbouring seeds or names have nothing in common.
        digest = hashlib.sha256(repr((self.seed, *name)).encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))

    def draw(
        self, word: str, m: int | None, total: int, draw: Draw, particles: int = 1
    ) -> dict[str, Tensor]:
        """A sample of size `total`, of `particles` sequences each, in chunks with streams (word, m,
        number); the processes of a job share the chunks. ValueError for a sample of size 0."""
        if total < 1 or particles < 1:
            raise ValueError(f"{total} times {particles} texts cannot be drawn; give 1 or more")
        at_once = max(1, self.rows // particles)
        starts = range(0, total, at_once)
        own = range(processes.rank(), len(starts), processes.count())
        parts: dict[int, dict[str, Tensor]] = {}
        for n in processes.progress(own, word, m):
            drawn = vars(draw(min(at_once, total - starts[n]), self.stream(word, m, n)))
            parts[n] = {name: part.cpu() for name, part in drawn.items() if part is not None}
        for of_process in processes.gather(parts):
            parts |= of_process
        chunks = [parts[n] for n in range(len(starts))]
        joined = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return {name: tensor.to(self.device) for name, tensor in joined.items()}


def draw_population(
    streams: Streams,
    word: str,
    m: int | None,
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    runs: int,
    rule: Rule,
) -> Population:
    """R = runs runs of K = particles, drawn in chunks; ValueError where all ended with weight 0."""

    def draw(size: int, generator: torch.Generator) -> Population:
        return tsmc(sigma, twist, particles, generator, size, rule)

    population = Population(**streams.draw(word, m, runs, draw, particles))
    if not population.is_alive().any():
        fault = f"all {runs} runs of {particles} particles ended with weight zero"
        remedy = "see whether one text can satisfy all factors"
        raise ValueError(f"{fault}; {remedy}, use more particles, or soften the potential")
    return population
