"""How far a run is, in one line: "phase 9 of 24, generation 1, sampling, 3/8, about 40 s left".

    seconds left = (work of the phases to come) * (seconds / work of the phases done so far)

The plan of a run names its phases and the work of each: about how many sequences a network reads.
The figures of each step go to metrics.jsonl, the seconds of each phase to seconds.json.
"""

import math
import shutil
import sys
import time

from torch import Tensor

from eval.run.command import say
from tinystories.errors import InputError

INTERVAL = 0.2  # seconds between two updates of the line
Place = tuple[str, int | None]  # phase and generation; None outside of generations


def name_of(place: Place) -> str:
    """The name of a phase for people."""
    phase, m = place
    return phase if m is None else f"generation {m}, {phase}"


def duration(seconds: float) -> str:
    """Seconds, or minutes from two on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class Progress:
    """A report (`tsmc.interfaces.Report`) of one phase after the other."""

    def __init__(self, is_shown: bool):
        self.is_shown = is_shown
        self.is_terminal = is_shown and sys.stderr.isatty()
        self.plan: dict[Place, float] = {}  # the work of each phase, in their order
        self.work = 0.0  # of the phases that this process has computed, and their seconds
        self.seconds = 0.0
        self.records: list[dict] = []  # of the present phase

    def begin(self, place: Place, steps: int) -> None:
        """A phase of so many steps begins to be computed."""
        self.place = place
        self.steps = steps
        self.records = []
        self.start = self.shown = time.monotonic()
        self.show()

    def __call__(self, **figures: float | Tensor) -> None:
        """Record the figures of one step; InputError for NaN."""
        numbers = {name: float(value) for name, value in figures.items()}
        step = len(self.records) + 1
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise InputError(f"step {step}: {name} is {value}; lower the learning rate")
        phase, m = self.place
        self.records.append({"phase": phase, "generation": m, "step": step, **numbers})
        if time.monotonic() > self.shown + INTERVAL:
            self.show()

    def line(self, share: float, *details: str) -> str:
        """The phase, its details, and the time left where `share` of the phase is done."""
        parts = [name_of(self.place), *details]
        if self.place in self.plan:
            number = list(self.plan).index(self.place)
            parts.insert(0, f"phase {number + 1} of {len(self.plan)}")
            work = share * self.plan[self.place]
            to_come = sum(list(self.plan.values())[number:]) - work
            seconds = self.seconds + time.monotonic() - self.start
            if self.work + work > 0:
                left = to_come * seconds / (self.work + work)
                parts.append(f"about {duration(left)} left")
        return ", ".join(parts)

    def show(self) -> None:
        """Write the line anew on a terminal."""
        if self.is_terminal:
            step = len(self.records)
            line = self.line(step / max(1, self.steps), f"{step}/{self.steps}", *self.told())
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            self.shown = time.monotonic()

    def told(self) -> list[str]:
        """The figures of the last step that people read; a tempered target has no telling loss."""
        last = self.records[-1] if self.records else {}
        names = ["power", "positive"] if last.get("power", 1) < 1 else ["loss", "ess"]
        titles = {"positive": "phi > 0 in"}
        return [f"{titles.get(name, name)} {last[name]:.3g}" for name in names if name in last]

    def end(self) -> float:
        """The phase has been computed; returns its seconds, which a log has in a line."""
        seconds = time.monotonic() - self.start
        if self.is_shown and not self.is_terminal:
            say(self.line(1.0, duration(seconds), *self.told()))
        self.clear()
        self.work += self.plan.get(self.place, 0.0)
        self.seconds += seconds
        return seconds

    def clear(self) -> None:
        """Make room for another line on a terminal."""
        if self.is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
