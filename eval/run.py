"""A run of `main.py` is a directory (docs/options.md lists its files), locked by process 0.

Each of its folders is written under another name and renamed, so it is there completely or not at
all. With --resume a run goes on behind its last generation; at most one generation is lost. Every
random stream has a name, so the results are those of a run that was never interrupted, to the byte.
"""

import contextlib
import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor
from tqdm import tqdm

from distill import Learner
from eval.command import say
from eval.config import Config
from tinystories import checkpoint
from tinystories.errors import InputError
from tsmc import processes
from twist.pair import Pair, load_pair, save_pair

STATE, ROW, SECONDS = "state.safetensors", "row.json", "seconds.json"


class Run(contextlib.AbstractContextManager):
    """The directory of a run, locked inside the `with` block, and its progress."""

    def __init__(self, config: Config, resumed: Path | None, hashes: dict[str, str]):
        """A new run, or that in the directory `resumed`; InputError where it cannot be."""
        self.config = config
        self.writes = processes.rank() == 0
        self.records: list[dict] = []  # the figures of each step of this generation
        self.bar = tqdm(disable=True)
        self.title = ""  # of the bar
        self.start = time.monotonic()
        self.processor_start = time.process_time()
        path = resumed or Path(config.run.out or f"runs/{config.run.preset}")
        number = 1
        while not (resumed or config.run.out) and path.exists():
            number += 1
            path = Path(f"runs/{config.run.preset}-{number}")
        self.path = processes.first(path)
        if resumed is None and processes.first(path.exists()):
            fault = f"--out {path}: exists already"
            raise InputError(f"{fault}; choose another, or go on with --resume")
        last = self.last()
        if last is not None and last > config.run.generations:
            fault = f"--generations {config.run.generations}: {path} has {last} already"
            raise InputError(f"{fault}; give at least {last}")
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = filelock.FileLock(self.path / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            fault = f"{self.path}: another process is writing there"
            raise InputError(f"{fault}; wait or stop it") from None
        if resumed:
            made = checkpoint.read_json(self.path / "config.json")
            made["generations"] = config.run.generations
        else:
            versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
            made = config.as_json() | {"versions": versions, "networks": hashes}
        checkpoint.write_json(self.path / "config.json", made)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.bar.close()
        if self.writes:
            self.lock.release()
        if isinstance(error, KeyboardInterrupt):
            message = f"interrupted; continue with --resume {self.path}"
            raise KeyboardInterrupt(message) from error

    def last(self) -> int | None:
        """The last generation that is there; None if there is none."""
        count = processes.first(count_generations(self.path))
        return count - 1 if count > 0 else None

    def folder(self, m: int | None) -> Path:
        """The folder of a generation, or of Base and Target where m is None."""
        return self.path / ("base" if m is None else f"generation-{m}")

    def keep(
        self,
        m: int | None,
        row: dict,
        samples: list[dict],
        learner: Learner | None = None,
        pair: Pair | None = None,
    ) -> None:
        """Write the folder of a generation: its row and texts, its pair, the learner's state."""
        if self.writes:
            folder = self.path / f".{self.folder(m).name}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if pair is not None:
                save_pair(folder, pair, learner.base)
                checkpoint.write_tensors(folder / STATE, learner.state())
            spent = {"core_seconds": time.process_time() - self.processor_start}
            checkpoint.write_json(folder / SECONDS, spent)
            write_lines(folder / "samples.jsonl", samples)
            write_lines(folder / "metrics.jsonl", self.records)
            checkpoint.write_json(folder / ROW, finite_or_null(row))
            # What is left of a chain that was broken before it.
            shutil.rmtree(self.folder(m), ignore_errors=True)
            os.rename(folder, self.folder(m))
            if m is not None:
                self.say_time(m, row)
        self.records = []
        self.start = time.monotonic()
        self.processor_start = time.process_time()
        processes.gather(None)  # nobody reads before it is there

    def restore(self, m: int, learner: Learner) -> Pair:
        """(p^(m), psi^(m)) of a generation, and the learner as it was then."""
        learner.resume(checkpoint.read_tensors(self.folder(m) / STATE))
        return load_pair(self.folder(m), learner.base)

    def finish(self) -> dict:
        """Write results.json: the rows Base and Target, and those of all generations."""
        if not self.writes:
            return {}
        options = self.config.run
        results: dict[str, Any] = {"learner": options.learner, "seed": options.seed}
        results["potential"] = list(options.potential)
        results |= checkpoint.read_json(self.folder(None) / ROW)
        rows = [self.folder(m) / ROW for m in range(options.generations + 1)]
        results["generations"] = [checkpoint.read_json(row) for row in rows]
        checkpoint.write_json(self.path / "results.json", results)
        return results

    def __call__(self, word: str, m: int | None, steps: int, **figures: float | Tensor) -> None:
        """Show one step and record its figures (a `Report`)."""
        numbers = {name: float(value) for name, value in figures.items()}
        if numbers:
            step = 1 + sum(record["phase"] == word for record in self.records)
            self.records.append({"phase": word, "generation": m, "step": step} | numbers)
        title = word if m is None else f"generation {m}, {word}"
        if title != self.title:
            self.bar.close()
            self.title = title
            # Without a terminal there is no bar, only the line of each generation.
            hidden = None if self.writes else True
            self.bar = tqdm(total=steps, desc=title, leave=False, disable=hidden)
        self.bar.set_postfix({name: f"{value:.3g}" for name, value in numbers.items()}, False)
        self.bar.update()

    def say(self, line: str) -> None:
        """A line on standard error, of one process; the bar makes room for it."""
        if self.writes:
            self.bar.clear()
            say(line)

    def say_time(self, m: int, row: dict) -> None:
        """What generation m has come to, its seconds, and how long the others will take."""
        seconds = time.monotonic() - self.start
        left = (self.config.run.generations - m) * seconds
        said = {"toxicity": "toxicity", "log phi": "log_phi", "KL": "kl_target_proposal"}
        numbers = [f"{name} {row[key]:.3g}" for name, key in said.items() if row.get(key)]
        time_left = f", about {left:.0f} s left" if left else ""
        self.say(", ".join([f"generation {m}: {seconds:.0f} s", *numbers]) + time_left)


def count_generations(run: Path) -> int:
    """How many generations the directory of a run holds, up to the first that is not there."""
    count = 0
    while (run / f"generation-{count}").exists():
        count += 1
    return count


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write a file with a line of JSON for each row."""
    lines = [json.dumps(finite_or_null(row)) + "\n" for row in rows]
    checkpoint.write_text(path, "".join(lines))


def read_lines(path: Path) -> list[dict]:
    """The rows of such a file."""
    with checkpoint.reading(path, "is no file of rows"):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def finite_or_null(value: Any) -> Any:
    """The value as JSON has it, with None in place of NaN and infinity, which JSON lacks."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: None)
