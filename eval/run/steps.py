"""The phases of a run: the loops of the algorithm with progress on screen and in metrics.jsonl, and their state on disk.

A run is a fixed sequence of phases, each a loop of steps (`RunSteps`) or of chunks of a sample (`RunChunks`). Between two
of them the state of the loop may be saved: the objects that it changes, or the chunks that it has, and the records of
metrics.jsonl. A run that is continued goes through the same phases; one that had finished gives its last state back and does
nothing, one that was cut off goes on behind its last saved step. Chunks are known by their number, so that any number of
processes can go on with what any other number has begun.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eval.run import processes
from eval.run.command import say
from eval.run.state import State, give_state, read_state, take_state, write_state
from tinystories.errors import InputError
from tsmc.steps import Chunks, Steps

SECONDS = 5.0  # between lines of progress where no terminal shows a bar


class Progress:
    """How far a phase has come: on screen, in metrics.jsonl, and in its file under resume/."""

    def __init__(self, directory, name: str, generation: int | None, total: int):
        """`directory` is the run's `RunDirectory`; generation is None before the first."""
        self.directory, self.phase, self.generation, self.total = directory, name, generation, total
        self.label = name if generation is None else f"generation {generation}  {name}"
        self.number = directory.begun = directory.begun + 1
        place = "start" if generation is None else str(generation)
        self.path: Path = directory.path / "resume" / f"{place}-{name.replace(' ', '-')}"
        self.of = [self.path.name, directory.identity_of(generation, name)]
        self.records: list[dict] = []
        self.figures: dict[str, float] = {}
        self.done = self.first = 0
        directory.phase = self.label

    def restore(self) -> dict | None:
        """What an earlier process has saved of this phase; InputError where the file is of another phase or run."""
        if not self.path.exists():
            return None
        saved = read_state(self.path, self.directory.device)
        if saved.get("of") != self.of:
            raise InputError(f"{self.path}: belongs to another phase or run; delete it to repeat its phase")
        self.done, self.records = saved["done"], saved["records"]
        for record in self.records:
            self.directory.log(record)
        return saved["state"]

    def save(self, state: dict) -> None:
        """Write the phase's state; InputError where the run's directory is no longer there."""
        if processes.rank() == 0:
            if not (self.directory.path / "config.json").exists():
                raise InputError(f"{self.directory.path}: is no longer there; continue the run where it is, or anew")
            write_state(self.path, {"of": self.of, "done": self.done, "records": self.records, "state": state})
        self.saved = time.monotonic()

    def record(self, step: int, figures: dict[str, float]) -> None:
        """One line of metrics.jsonl."""
        record = {"phase": self.phase, "generation": self.generation, "step": step, **figures}
        self.records.append(record)
        self.directory.log(record)
        for name, value in figures.items():
            jumps = name in ("loss", "ess") and name in self.figures  # these are shown as running means
            self.figures[name] = 0.95 * self.figures[name] + 0.05 * value if jumps else value

    def watch(self, take: Callable[[bool], dict]) -> Iterator[tqdm]:
        """Yield before every step, and then show, save every `save_every` seconds, stop where the user has asked for it.

        take(finished) gives the state to save. KeyboardInterrupt, after saving.
        """
        self.began = self.shown = self.saved = time.monotonic()
        self.first = self.done
        self.directory.since = self.directory.since or self.began
        is_watched = processes.rank() == 0 and sys.stderr.isatty() and not self.directory.quiet
        with tqdm(total=self.total, initial=self.done, desc=self.place() + self.label, disable=not is_watched) as bar:
            while self.done < self.total:
                self.directory.phase = f"{self.label}, step {self.done + 1}"
                yield bar
                self.directory.phase = self.label
                self.show(bar)
                if processes.any_of(self.directory.interrupted):
                    self.save(take(self.done == self.total))
                    raise KeyboardInterrupt(f"interrupted and saved; continue with --resume {self.directory.path}")
                if time.monotonic() - self.saved >= self.directory.save_every:
                    self.save(take(False))
        self.directory.worked += self.work()
        self.save(take(True))

    def work(self) -> float:
        """What this process has done of the phase, in the units of the run's plan."""
        whole = self.directory.plan[self.number - 1] if self.directory.plan else 0.0
        return whole * (self.done - self.first) / self.total

    def place(self) -> str:
        """The number of the phase, and the time until the end of the run at the pace so far."""
        plan = self.directory.plan
        if not plan:
            return ""
        worked = self.directory.worked + self.work()
        spent = time.monotonic() - self.directory.since  # with what lies between the phases
        left = sum(plan[self.number :]) + plan[self.number - 1] * (1 - self.done / self.total)
        if worked == 0 or left == 0:
            return f"{self.number}/{len(plan)}  "
        seconds = spent / worked * left
        return f"{self.number}/{len(plan)}, {f'{seconds / 60:.0f} min' if seconds > 90 else f'{seconds:.0f} s'} to go  "

    def show(self, bar: tqdm) -> None:
        """The bar on a terminal; elsewhere a line every few seconds: phase, figures, times left."""
        if self.directory.quiet:
            return
        if not bar.disable:
            bar.set_description(self.place() + self.label, refresh=False)
            bar.set_postfix({name: f"{value:.3g}" for name, value in self.figures.items()}, refresh=False)
            bar.update(self.done - bar.n)
        elif processes.rank() == 0 and (self.done == self.total or time.monotonic() - self.shown > SECONDS):
            self.shown = time.monotonic()
            spent = self.shown - self.began
            left = spent * (self.total - self.done) / (self.done - self.first)
            figures = "  ".join(f"{name} {value:.3g}" for name, value in self.figures.items())
            times = f"{left:.0f} s left" if self.done < self.total else f"{spent:.0f} s"
            say(f"{self.place()}{self.label}  {self.done}/{self.total}  {figures}  {times}")


class RunSteps(Steps):
    """A loop whose `state` is everything that a step changes; gradients of the modules in it are shared by the processes."""

    def __init__(self, progress: Progress, state: dict[str, State]):
        super().__init__(progress.total, progress.label)
        self.progress, self.state = progress, state
        for thing in state.values():
            if isinstance(thing, nn.Module):
                processes.share_gradients(thing)

    def __iter__(self) -> Iterator[int]:
        """Numbers of the steps still to do."""
        progress = self.progress
        if (saved := progress.restore()) is not None:
            give_state(self.state, saved)
        if progress.done == progress.total:
            return
        for _ in progress.watch(lambda finished: take_state(self.state, finished)):
            self.step = progress.done
            yield self.step
            progress.done += 1

    def report(self, **figures: float | Tensor) -> None:
        """Figures of the current step, one line of metrics.jsonl; a tensor is this process's part of a sum."""
        summed = {name: processes.total(value) for name, value in figures.items()}
        super().report(**summed)
        self.progress.record(self.step + 1, summed)


class RunChunks(Chunks):
    """A sample in chunks of which the processes draw one each at a time."""

    def __init__(self, progress: Progress, total: int, at_once: int, streams: Callable[[int], torch.Generator]):
        super().__init__(total, at_once, streams)
        self.progress, progress.total = progress, len(self.sizes)
        self.by_number: dict[int, dict[str, Tensor]] = {}
        self.figures: dict[str, float] = {}

    def __iter__(self) -> Iterator[tuple[int, torch.Generator]]:
        """Size and random stream of the chunks still to draw."""
        progress = self.progress
        self.by_number = progress.restore() or {}
        missing = [number for number in range(len(self.sizes)) if number not in self.by_number]
        if not missing:
            return
        rounds = [missing[start : start + processes.count()] for start in range(0, len(missing), processes.count())]
        for _, numbers in zip(progress.watch(lambda finished: self.by_number), rounds, strict=False):
            number = numbers[min(processes.rank(), len(numbers) - 1)]  # one without a chunk of its own repeats the last
            yield self.sizes[number], self.streams(number)
            part = {name: tensor.cpu() for name, tensor in self.part.items()}
            for other, tensors, figures in processes.gather((number, part, self.figures)):
                if other not in self.by_number:
                    self.by_number[other] = {name: t.to(progress.directory.device) for name, t in tensors.items()}
                    progress.record(other + 1, figures)
            progress.done = len(self.by_number)

    def keep(self, **tensors: Tensor) -> None:
        """What the current chunk has given."""
        self.part = tensors

    def report(self, **figures: float | Tensor) -> None:
        """Figures of the current chunk: a line of metrics.jsonl."""
        self.figures = {name: float(value) for name, value in figures.items()}

    def kept(self) -> dict[str, Tensor]:
        """The tensors of all chunks by name, in the order of the chunks."""
        self.parts = [self.by_number[number] for number in sorted(self.by_number)]
        return super().kept()
