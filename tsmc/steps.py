"""A loop that can be watched, interrupted and continued.

    for update in phase.steps(total, twist=twist, optimizer=optimizer, generator=generator):
        ...
        phase.report(loss=loss)

`steps` yields the numbers of the steps still to do. Whoever runs the loop may pass a phase that shows progress, saves the named
state between steps and restores it before the first one (`eval.run.steps.RunPhase`); this one only counts.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """Modules, optimisers, and whatever else can give and take its state."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict): ...


State = Stateful | torch.Generator | list
"""What a loop changes: the position of a random stream counts as much as the weights; a list gathers finished parts."""


class Phase:
    """The plain loop: nothing is shown, nothing is saved. `str(phase)` names it in messages."""

    def __str__(self) -> str:
        return "sampling"

    def steps(self, total: int, **state: State) -> Iterator[int]:
        """Numbers of the steps to do; `state` names everything that a step changes."""
        yield from range(total)

    def report(self, **figures: float) -> None:
        """Figures of the step that has just been done, at most once a step."""

    def note(self, **figures: float) -> None:
        """Figures of the whole loop, after its last step."""
