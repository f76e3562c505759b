"""A run of `main.py` is a directory:

    config.json       every option, the versions, and hashes of the networks
    base/             the rows Base and Target, and their texts
    target/           exact samples of sigma, if the run drew them
    generation-m/     p^(m) and psi^(m), what the learner needs to go on (state.safetensors), its
                      row (row.json), texts (samples.jsonl) and steps (metrics.jsonl)
    results.json      all rows, once the run has finished
    figures/          PNG
    potential/        copies of the user's files that --potential names

A folder is written under another name and renamed, so it is there completely or not at all. With
--resume a run goes on behind its last generation; at most one generation is lost. Every random
stream has a name, so the results are those of a run that was never interrupted, to the byte.
Process 0 writes, while it holds `.lock`.
"""

import contextlib
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor
from tqdm import tqdm

import tinystories
from eval.command import say
from eval.config import Config
from eval.scorers.potentials import user_file
from eval.world import World, identity, read_network
from tinystories import checkpoint
from tinystories.errors import InputError
from tsmc import processes
from twist.pair import Pair, load_pair, save_pair

STATE, ROW, SECONDS = "state.safetensors", "row.json", "seconds.json"


class Run(contextlib.AbstractContextManager):
    """The directory of a run, locked inside the `with` block, and its progress."""

    def __init__(self, config: Config, resumed: Path | None):
        """A new run, or the one in the directory `resumed`; InputError where it cannot be."""
        self.config = config
        self.writes = processes.rank() == 0
        self.records: list[dict] = []  # the figures of each step of this generation
        self.bar: tqdm | None = None
        self.title = ""  # of the bar
        self.start = time.monotonic()
        self.processor_start = time.process_time()
        networks = identity(config.run, resumed and resumed / "potential")
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        made_by = {"versions": versions, "networks": networks}
        if len(set(processes.gather(json.dumps([config.as_json(), made_by])))) > 1:
            raise InputError("the processes of this job have different options; start them alike")
        self.path = processes.first(resumed or (new_directory(config) if self.writes else None))
        last = self.last()
        if not self.writes:
            return
        if resumed and checkpoint.read_json(self.path / "config.json").get("networks") != networks:
            fault = f"{self.path}: a network or potential has changed since the run began"
            raise InputError(f"{fault}; restore it or start a new run")
        if last is not None and last > config.run.generations:
            fault = f"--generations {config.run.generations}: {self.path} has {last} already"
            raise InputError(f"{fault}; give at least {last}")
        self.lock = filelock.FileLock(self.path / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            fault = f"{self.path}: another process is writing there"
            raise InputError(f"{fault}; wait or stop it") from None
        if not resumed:
            for spec in config.run.potential:
                if own := user_file(spec):
                    text = own[0].read_text(encoding="utf-8")
                    checkpoint.write_text(self.path / "potential" / own[0].name, text)
        checkpoint.write_json(self.path / "config.json", config.as_json() | made_by)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.close_bar()
        if self.writes:
            self.lock.release()
        if isinstance(error, KeyboardInterrupt):
            message = f"interrupted; continue with --resume {self.path}"
            raise KeyboardInterrupt(message) from error

    def last(self) -> int | None:
        """The last generation that is there; None if there is none."""
        m = None
        while processes.first((self.folder(0 if m is None else m + 1)).exists()):
            m = 0 if m is None else m + 1
        return m

    def folder(self, m: int | None) -> Path:
        """The folder of a generation, or of Base and Target where m is None."""
        return self.path / ("base" if m is None else f"generation-{m}")

    @contextlib.contextmanager
    def writing(self, m: int | None, row: dict, samples: list[dict]) -> Iterator[Path]:
        """Yield a folder to add files to; it becomes that of m, with its row and texts."""
        temporary = self.path / f".{self.folder(m).name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        write_lines(temporary / "samples.jsonl", samples)
        write_lines(temporary / "metrics.jsonl", self.records)
        checkpoint.write_json(temporary / ROW, finite_or_null(row))
        shutil.rmtree(self.folder(m), ignore_errors=True)  # of a chain that was broken before it
        os.rename(temporary, self.folder(m))
        self.records = []

    def keep(
        self, m: int, pair: Pair, world: World, state: dict[str, Tensor], row: dict, samples: list
    ) -> None:
        """Write the folder of generation m: its pair, the learner's state, its row and texts."""
        if self.writes:
            with self.writing(m, row, samples) as folder:
                write = partial(tinystories.save, tokenizer=world.tokenizer)
                save_pair(folder, pair, world.base, write)
                checkpoint.write_tensors(folder / STATE, state)
                spent = {"core_seconds": time.process_time() - self.processor_start}
                checkpoint.write_json(folder / SECONDS, spent)
            self.processor_start = time.process_time()
            self.say_time(m, row)
        processes.gather(None)  # nobody reads before it is there

    def load_pair(self, m: int, world: World) -> Pair:
        """(p^(m), psi^(m)) of a generation that was kept."""
        return load_pair(self.folder(m), world.base, read_network)

    def finish(self, rows: dict, scores: int) -> dict:
        """Write results.json: the rows Base and Target, those of all generations, and the scores of
        phi that training took."""
        options = self.config.run
        results = {name: getattr(options, name) for name in ("learner", "seed", "potential")}
        results |= {**rows, "scores": scores}
        results["generations"] = [self.read_row(m) for m in range(options.generations + 1)]
        results = finite_or_null(results)
        if self.writes:
            checkpoint.write_json(self.path / "results.json", results)
        return results

    def read_row(self, m: int | None) -> dict:
        """The row of a generation, or the rows Base and Target where m is None."""
        return processes.first(checkpoint.read_json(self.folder(m) / ROW) if self.writes else {})

    def state(self, m: int) -> dict[str, Tensor]:
        """What the learner needs to go on after generation m."""
        return checkpoint.read_tensors(self.folder(m) / STATE)

    def __call__(self, word: str, m: int | None, steps: int, **figures: float | Tensor) -> None:
        """Record the figures of one step (a `Report`); InputError for NaN."""
        numbers = {name: float(value) for name, value in figures.items()}
        place = {"phase": word, "generation": m}
        step = 1 + sum(record["phase"] == word for record in self.records)
        for name, value in numbers.items():
            if not math.isfinite(value):
                fault = f"generation {m}, {word}, step {step}: {name} is {value}"
                raise InputError(f"{fault}; lower the learning rate")
        self.records.append(place | {"step": step} | numbers)
        title = word if m is None else f"generation {m}, {word}"
        if title != self.title:
            self.close_bar()
            self.title = title
            # Without a terminal there is no bar, only the line of each generation.
            hidden = None if self.writes else True
            self.bar = tqdm(total=steps, desc=title, leave=False, disable=hidden)
        self.bar.set_postfix({name: f"{value:.3g}" for name, value in numbers.items()}, False)
        self.bar.update()

    def close_bar(self) -> None:
        """Make room for other lines."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
            self.title = ""

    def say(self, line: str) -> None:
        """A line on standard error, of one process."""
        self.close_bar()
        if self.writes:
            say(line)

    def say_time(self, m: int, row: dict) -> None:
        """What generation m has come to, its seconds, and how long the others will take."""
        seconds = time.monotonic() - self.start
        self.start = time.monotonic()
        left = (self.config.run.generations - m) * seconds
        said = {"toxicity": "toxicity", "log phi": "log_phi", "KL": "kl_target_proposal"}
        numbers = [f"{name} {row[key]:.3g}" for name, key in said.items() if row.get(key)]
        time_left = f", about {left:.0f} s left" if left else ""
        self.say(", ".join([f"generation {m}: {seconds:.0f} s", *numbers]) + time_left)


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write a file with a line of JSON for each row."""
    lines = [json.dumps(finite_or_null(row)) + "\n" for row in rows]
    checkpoint.write_text(path, "".join(lines))


def read_lines(path: Path) -> list[dict]:
    """The rows of such a file."""
    with checkpoint.reading(path, "is no file of rows"):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def new_directory(config: Config) -> Path:
    """The directory of --out, or else a new one in runs/; InputError where it exists already."""
    path = Path(config.run.out or f"runs/{config.run.preset}")
    number = 1
    while not config.run.out and path.exists():
        number += 1
        path = Path(f"runs/{config.run.preset}-{number}")
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        fault = f"--out {path}: exists already"
        raise InputError(f"{fault}; choose another, or continue its run with --resume") from None
    return path


def finite_or_null(value: Any) -> Any:
    """The value as JSON has it, with None in place of NaN and infinity, which JSON lacks."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: None)
