"""A run's directory and its progress on screen.

    config.json     every option, versions, seed          metrics.jsonl   one line per step of every phase
    results.json    the final table                       samples.jsonl   texts with scores, by source and TSMC run
    generation-m/   model, tokenizer, twist               figures/        PNG

JSON files and checkpoints are written whole or not at all; `metrics.jsonl` grows by whole lines.
"""

import dataclasses
import json
import platform
import sys
import time
from pathlib import Path

import numpy
import torch
from tqdm import tqdm

from tinystories.checkpoint import write_json, write_text
from tinystories.errors import InputError


class RunDirectory:
    """A directory that did not exist before; InputError where it does or cannot be made."""

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=False)
            self.metrics = open(self.path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115, open for the whole run
        except FileExistsError:
            raise InputError(f"--out {path}: exists already; choose another directory or remove it") from None
        except OSError as error:
            raise InputError(f"--out {path}: cannot be written ({error.strerror}); choose another directory") from error
        self.samples: list[dict] = []

    @classmethod
    def numbered(cls, parent: Path, stem: str) -> "RunDirectory":
        """The first of stem, stem-2, stem-3, ... that is free."""
        number = 1
        while (parent / (name := stem if number == 1 else f"{stem}-{number}")).exists():
            number += 1
        return cls(parent / name)

    def write_config(self, config) -> None:
        """All options and the versions that the numbers depend on."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
        write_json(self.path / "config.json", dataclasses.asdict(config) | {"versions": versions})

    def log(self, **record) -> None:
        """One line of metrics.jsonl; InputError where the disk is full."""
        try:
            self.metrics.write(json.dumps(record) + "\n")
            self.metrics.flush()
        except OSError as error:
            words = f"cannot be written ({error.strerror}); free space and start again"
            raise InputError(f"{self.path / 'metrics.jsonl'}: {words}") from error

    def read_metrics(self) -> list[dict]:
        """Every record so far."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def add_samples(self, rows: list[dict]) -> None:
        """More rows of samples.jsonl, which is written anew as a whole."""
        self.samples += rows
        write_text(self.path / "samples.jsonl", "".join(json.dumps(row) + "\n" for row in self.samples))

    def progress(self, phase: str, generation: int | None, total: int) -> "Progress":
        """Progress of a phase, on screen and in metrics.jsonl."""
        return Progress(self, phase, generation, total)


class Progress:
    """Called as progress(done, loss=..., ess=...): a bar on a terminal, a plain line every few seconds elsewhere."""

    SECONDS = 5.0

    def __init__(self, run: RunDirectory, phase: str, generation: int | None, total: int):
        self.run, self.phase, self.generation, self.total = run, phase, generation, total
        self.label = phase if generation is None else f"generation {generation}  {phase}"
        self.began = self.shown = time.monotonic()
        self.figures: dict[str, float] = {}
        self.bar = tqdm(total=total, desc=self.label, leave=True) if sys.stderr.isatty() else None

    def __call__(self, done: int, **figures: float) -> None:
        self.run.log(phase=self.phase, generation=self.generation, step=done, **figures)
        for name, value in figures.items():
            jumps = name in ("loss", "ess") and name in self.figures  # these are shown as running means
            self.figures[name] = 0.95 * self.figures[name] + 0.05 * value if jumps else value
        if self.bar is not None:
            self.bar.set_postfix({name: f"{value:.3g}" for name, value in self.figures.items()}, refresh=False)
            self.bar.update(done - self.bar.n)
        elif done == self.total or time.monotonic() - self.shown > self.SECONDS:
            self.shown = time.monotonic()
            self.print_line(done)

    def print_line(self, done: int) -> None:
        """Phase, figures, time left."""
        spent = time.monotonic() - self.began
        left = spent * (self.total - done) / max(1, done)
        figures = "  ".join(f"{name} {value:.3g}" for name, value in self.figures.items())
        times = f"{left:.0f} s left" if done < self.total else f"{spent:.0f} s"
        print(f"{self.label}  {done}/{self.total}  {figures}  {times}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()


TABLE = (
    ("toxicity", "toxicity", ".3f"),
    ("similarity", "similarity", ".3f"),
    ("KL(sigma||q)", "kl_target_proposal", ".2f"),
    ("log Z-hat", "log_z_hat_mean", ".2f"),
    ("(spread)", "log_z_hat_std", ".2f"),
    ("ESS", "ess", ".1f"),
    ("distinct", "distinct", ".2f"),
)


def table(results: dict) -> str:
    """Base, Target and the generations as aligned columns; Target's log Z stands in the column of log Z-hat."""
    target = results["target"] | {"log_z_hat_mean": results["target"]["log_z"]}
    named = [("Base", results["base"]), ("Target", target)]
    named += [(f"Generation {row['generation']}", row) for row in results["generations"]]
    lines = [["", *(title for title, _, _ in TABLE)]]
    for name, row in named:
        lines.append([name, *(format(row[key], form) if key in row else "" for _, key, form in TABLE)])
    return align(lines)


def align(lines: list[list[str]]) -> str:
    """Cells in columns, the first flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(row).rstrip() for row in rows)
