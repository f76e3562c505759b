"""A phase of a run: its progress on screen and in metrics.jsonl, and its state on disk.

A run is a fixed sequence of phases, each a loop of steps. Between two steps the state of the loop may be saved: the named
objects, the number of steps done, the records of metrics.jsonl. A run that is continued goes through the same phases; one
that had finished gives its last state back and takes no step, one that was cut off goes on behind its last saved step.
"""

import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from eval.run import processes as ranks
from eval.run.state import give_state, read_state, take_state, write_state
from tsmc.steps import Phase, State


class RunPhase(Phase):
    """One phase of generation `generation` (None before the first) of a RunDirectory."""

    SECONDS = 5.0  # between lines of progress where no terminal shows a bar

    def __init__(self, run, name: str, generation: int | None):
        self.run, self.name, self.generation = run, name, generation
        self.label = name if generation is None else f"generation {generation}  {name}"
        place = "start" if generation is None else str(generation)
        self.path = run.path / "resume" / f"{place}-{name.replace(' ', '-')}"
        self.figures: dict[str, float] = {}
        self.records: list[dict] = []
        self.done = 0

    def __str__(self) -> str:
        return self.label

    def steps(self, total: int, **state: State) -> Iterator[int]:
        """Numbers of the steps still to do; between them the state is saved every `save_every` seconds.

        KeyboardInterrupt, after saving, where the user has asked the run to stop.
        """
        self.restore(state)
        if self.done == total:
            return
        self.began = self.shown = self.saved = time.monotonic()
        self.first = self.done
        watched = ranks.rank() == 0
        with tqdm(
            total=total, initial=self.done, desc=self.label, disable=not (watched and sys.stderr.isatty())
        ) as bar:
            for step in range(self.done, total):
                yield step
                self.done = step + 1
                self.show(total, bar)
                if ranks.any_of(self.run.interrupted):
                    self.save(state, finished=self.done == total)
                    raise KeyboardInterrupt(f"interrupted and saved; continue with --resume {self.run.path}")
                if time.monotonic() - self.saved >= self.run.save_every:
                    self.save(state, finished=False)
        self.save(state, finished=True)

    def report(self, **figures: float) -> None:
        """Figures of the current step: one line of metrics.jsonl."""
        record = {"phase": self.name, "generation": self.generation, "step": self.done + 1, **figures}
        self.records.append(record)
        self.run.log(record)
        for name, value in figures.items():
            jumps = name in ("loss", "ess") and name in self.figures  # these are shown as running means
            self.figures[name] = 0.95 * self.figures[name] + 0.05 * value if jumps else value

    def note(self, **figures: float) -> None:
        """Figures of the whole loop: one more line of metrics.jsonl."""
        self.run.log({"phase": self.name, "generation": self.generation, "step": self.done, **figures})

    def show(self, total: int, bar: tqdm) -> None:
        """The bar on a terminal; elsewhere a line every few seconds: phase, figures, time left."""
        if not bar.disable:
            bar.set_postfix({name: f"{value:.3g}" for name, value in self.figures.items()}, refresh=False)
            bar.update(1)
        elif ranks.rank() == 0 and (self.done == total or time.monotonic() - self.shown > self.SECONDS):
            self.shown = time.monotonic()
            spent = self.shown - self.began
            left = spent * (total - self.done) / (self.done - self.first)
            figures = "  ".join(f"{name} {value:.3g}" for name, value in self.figures.items())
            times = f"{left:.0f} s left" if self.done < total else f"{spent:.0f} s"
            print(f"{self.label}  {self.done}/{total}  {figures}  {times}", file=sys.stderr, flush=True)

    def save(self, state: dict[str, State], finished: bool) -> None:
        """Write the phase's state; a loop that has finished no longer needs its optimiser's."""
        if ranks.rank() == 0:
            write_state(
                self.path,
                {"done": self.done, "records": self.records, "state": take_state(state, finished)},
            )
        self.saved = time.monotonic()

    def restore(self, state: dict[str, State]) -> None:
        """Take up what an earlier process has saved of this phase, if it has."""
        if self.path.exists():
            saved = read_state(self.path, self.run.device)
            give_state(state, saved["state"])
            self.done, self.records = saved["done"], saved["records"]
            for record in self.records:
                self.run.log(record)
