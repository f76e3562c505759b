"""What a loop here is driven by: numbered steps, or chunks of a large sample, either of which can be reported to.

    for update in steps:                       for size, generator in chunks:
        ...                                        population = ...   # `size` of them, drawn with `generator`
        steps.report(loss=loss)                    chunks.keep(**tensors)
                                               chunks.kept()          # the tensors of all chunks, put together

These two only count. Whoever runs a loop may hand over steps that also show progress, save the state between steps and go on
from a saved one, or that share chunks among processes (`eval/run/steps.py`); the loop does not change.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tinystories.errors import InputError


class Steps:
    """The numbers 0 to total - 1."""

    def __init__(self, total: int, name: str = "the loop"):
        self.total, self.name, self.step = total, name, 0

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        for number in range(self.total):
            self.step = number
            yield number

    def report(self, **figures: float | Tensor) -> None:
        """Figures of the current step, before it changes anything; InputError where one is NaN or infinite."""
        for name, value in figures.items():
            if not math.isfinite(value):
                raise InputError(
                    f"{self.name}, step {self.step + 1}: {name} is {float(value)}; lower the learning rate"
                )


class Chunks:
    """A sample of size `total` in chunks of at most `at_once`, chunk i with the random stream streams(i)."""

    def __init__(self, total: int, at_once: int, streams: Callable[[int], torch.Generator]):
        self.sizes = [min(max(1, at_once), total - start) for start in range(0, total, max(1, at_once))]
        self.total, self.streams = total, streams
        self.parts: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[int, torch.Generator]]:
        self.parts = []
        for number, size in enumerate(self.sizes):
            yield size, self.streams(number)

    def keep(self, **tensors: Tensor) -> None:
        """What the current chunk has given, each tensor a row for each member."""
        self.parts.append(tensors)

    def report(self, **figures: float | Tensor) -> None:
        """Figures of the current chunk."""

    def kept(self) -> dict[str, Tensor]:
        """The tensors of all chunks by name, in the order of the chunks; InputError where there was none."""
        if not self.parts:
            raise InputError(f"a sample of size {self.total} holds nothing; ask for at least one")
        return {name: torch.cat([part[name] for part in self.parts]) for name in self.parts[0]}
