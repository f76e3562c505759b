"""Random streams by name, and large samples drawn in chunks of bounded memory.

Whatever draws at random gets a stream of its own, named by a word and its generation, so it gives
the same numbers whenever and wherever it is computed: after a resume, or in any process of a job.
R runs, K particles, N rows.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc import processes
from tsmc.interfaces import Report, Twist, ignore
from tsmc.sampler import Population, Sigma, tsmc

Draw = Callable[[int, torch.Generator], dict[str, Tensor]]  # (size, generator) -> tensors [size, .]


class Streams:
    """Random streams, each named by a word and its generation m (None outside of them)."""

    def __init__(self, seed: int = 0, device: str | torch.device = "cpu", rows: int = 1000):
        """`rows` sequences are drawn at a time."""
        self.seed = seed
        self.device = torch.device(device)
        self.rows = rows

    def stream(self, *name: str | int | None) -> torch.Generator:
        """The random stream of a name, such as ("ctl", 1); those of other names are independent."""
        # Hashed, so that streams of neighbouring seeds or names have nothing in common.
        digest = hashlib.sha256(repr((self.seed, *name)).encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))

    def draw(
        self,
        word: str,
        m: int | None,
        total: int,
        draw: Draw,
        particles: int = 1,
        report: Report = ignore,
    ) -> dict[str, Tensor]:
        """A sample of size `total`, of `particles` sequences each, in chunks with streams (word, m,
        number); the processes of a job share the chunks. InputError for a sample of size 0.
        """
        at_once = max(1, self.rows // particles)
        starts = range(0, total, at_once)
        if not starts:
            raise InputError("a sample of size 0 was asked for; ask for at least one")
        parts: dict[int, dict[str, Tensor]] = {}
        for n in range(processes.rank(), len(starts), processes.count()):
            size = min(at_once, total - starts[n])
            drawn = draw(size, self.stream(word, m, n))
            parts[n] = {name: tensor.cpu() for name, tensor in drawn.items()}
            report(word, m, -(-len(starts) // processes.count()))
        chunks: dict[int, dict[str, Tensor]] = {}
        for of_process in processes.gather(parts):
            chunks |= of_process
        sample = {}
        for name in chunks[0]:
            rows = [chunks[n][name] for n in range(len(starts))]
            sample[name] = torch.cat(rows).to(self.device)
        return sample


def draw_population(
    streams: Streams,
    word: str,
    m: int | None,
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    runs: int,
    report: Report = ignore,
    **rule,
) -> Population:
    """R = runs runs of K = particles, drawn in chunks with options of `tsmc`.

    InputError where every run ended with weight zero.
    """

    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        given = (sigma.model, twist, sigma.log_potential, particles, generator, size)
        return vars(tsmc(*given, log_prefix=sigma.log_prefix, **rule))

    population = Population(**streams.draw(word, m, runs, draw, particles, report))
    if not population.is_alive().any():
        fault = f"all {runs} runs of {particles} particles ended with weight zero"
        raise InputError(f"{fault}; use more particles, or soften the potential")
    return population
