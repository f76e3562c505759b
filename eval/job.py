"""A job of `main.py` is a folder, which process 0 locks and writes.

    config.json                  every option, and the versions of Python and PyTorch
    base/                        the rows Base and Target, and the texts that they were made of
    target/samples.safetensors   exact samples of sigma, where the job has drawn some
    generation-0/ ...            a generation each
    results.json                 all rows, once the last one is there

A folder of a generation holds pair.safetensors, state.safetensors (what the learner needs to go
on), samples.jsonl, metrics.jsonl (the figures of each step), seconds.json, and last row.json: what
has a row is complete. With --resume a job goes on behind its last row; at most one generation is
lost. Every random stream has a name, so the results are those of a job that was never interrupted,
to the byte.
"""

import contextlib
import json
import platform
import re
import shlex
import time
from pathlib import Path
from typing import Any

import filelock
import torch

from distill import Learner, Pair, load_pair, save_pair
from eval.command import say
from eval.metrics import KL, is_row
from eval.options import Options
from tinystories import files
from tsmc import processes

PAIR, STATE, ROW = "pair.safetensors", "state.safetensors", "row.json"
# What `replacing` writes before it takes the place of a file of a job; others are the user's.
PARTIAL = re.compile(
    r"((base|target|figures|generation-\d+)/)?\.(config|results|row|seconds|samples|metrics|pair"
    r"|state|generations)\.(json|jsonl|safetensors|png)\.\d+\.partial"
)


class Job(contextlib.AbstractContextManager):
    """The folder of a job, locked inside the `with` block."""

    def __init__(self, options: Options, resumed: Path | None):
        """A new job, or that in the folder `resumed`; ValueError where it cannot be."""
        self.options = options
        self.is_resumed = resumed is not None
        path = resumed or Path(options.out or f"runs/{options.preset}")
        number = 1
        while not (resumed or options.out) and path.exists():
            number += 1
            path = Path(f"runs/{options.preset}-{number}")
        self.path = processes.of_first(path)
        if processes.of_first(resumed is None and self.path.exists()):
            raise ValueError(f"--out {path}: exists already; choose another, or use --resume")
        last, wanted = self.num_done() - 1, options.generations
        if last > wanted:
            fault = f"--generations {wanted}: {self.path} has {last} already"
            raise ValueError(f"{fault}; give at least {last}")
        for m in (None, *range(last + 1)):
            if self.has(m):
                self.row(m)  # what is damaged is found before anything is learned
        for folder in (self.path / "figures", *map(self.folder, (None, *range(wanted + 1)))):
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{folder}: is no folder, as the job needs; move it away")

    def __enter__(self) -> "Job":
        """Lock the folder and write config.json; ValueError where another process writes."""
        self.start, self.core_start = time.monotonic(), time.process_time()
        if processes.rank() > 0:
            return self
        self.path.mkdir(parents=True, exist_ok=self.is_resumed)  # another job may have begun there
        self.lock = filelock.FileLock(self.path / ".lock", fallback_to_soft=False)
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            fault = f"{self.path}: another process is writing there"
            raise ValueError(f"{fault}; wait or stop it") from None
        except OSError as error:  # as network disks do
            fault = f"{self.path}: files cannot be locked there ({error.strerror})"
            say(f"{fault}; let no second process write there")
        for left in (*self.path.glob(".*.partial"), *self.path.glob("*/.*.partial")):
            if PARTIAL.fullmatch(left.relative_to(self.path).as_posix()):
                left.unlink()  # of a process that was killed as it wrote
        path = self.path / "config.json"
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        made = files.read_json(path) if path.exists() else {"versions": versions}
        files.write_json(path, made | self.options.as_json())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if processes.rank() == 0:
            self.lock.release()
        if isinstance(error, KeyboardInterrupt):
            message = f"interrupted; continue with --resume {shlex.quote(str(self.path))}"
            raise KeyboardInterrupt(message) from error

    def folder(self, m: int | None) -> Path:
        """The folder of a generation, or of Base and Target where m is None."""
        return self.path / ("base" if m is None else f"generation-{m}")

    def has(self, m: int | None) -> bool:
        """Whether the folder is complete, the same answer in all processes."""
        return processes.of_first((self.folder(m) / ROW).exists())

    def num_done(self) -> int:
        """How many generations are kept, with generation 0; the same answer in all processes."""
        return processes.of_first(count_generations(self.path))

    def row(self, m: int | None) -> dict:
        """A generation's row, or the rows of Base and Target by name; ValueError if damaged."""
        path = self.folder(m) / ROW
        row = files.read_json(path)
        rows = row if m is None else {"generation": row}
        is_complete = m is not None or "base" in row
        if not is_complete or not all(is_row(name, one) for name, one in rows.items()):
            fault = f"{path}: holds no row of a table"
            raise ValueError(f"{fault}; delete its folder, and it is made again")
        return row

    def keep(
        self, m: int | None, row: dict, samples: list, learner: Learner, pair: Pair | None = None
    ) -> None:
        """Write the folder of a generation: pair, learner's state, figures and texts, row last."""
        if processes.rank() == 0:
            folder = self.folder(m)
            (folder / ROW).unlink(missing_ok=True)  # where a generation before it was lost
            if pair is not None:
                save_pair(folder / PAIR, pair, learner.base)
                files.write_tensors(folder / STATE, learner.state())
                write_lines(folder / "metrics.jsonl", learner.records)
            spent = {"core_seconds": time.process_time() - self.core_start}
            files.write_json(folder / "seconds.json", spent)
            write_lines(folder / "samples.jsonl", samples)
            files.write_json(folder / ROW, finite_or_null(row))
        if pair is not None:
            learner.records.clear()
            seconds = time.monotonic() - self.start
            left = (self.options.generations - m) * seconds
            named = {"toxicity": "toxicity", "log phi": "log_phi", "KL": KL}
            known = {name: row.get(key) for name, key in named.items()}
            said = [f"{name} {value:.3g}" for name, value in known.items() if value is not None]
            say(", ".join([f"generation {m}: {seconds:.0f} s", *said, f"about {left:.0f} s left"]))
            say(f"  {row['examples'][0]}")
        self.start, self.core_start = time.monotonic(), time.process_time()
        processes.gather(None)  # nobody reads before it is there

    def restore(self, m: int, learner: Learner) -> Pair:
        """(p^(m), psi^(m)) of a generation, and the learner as it was then."""
        path = self.folder(m) / STATE
        state = files.read_tensors(path)
        with files.reading(path, "holds no state of this learner"):
            learner.resume(state)
        return load_pair(self.folder(m) / PAIR, learner.base)

    def finish(self) -> dict:
        """Write results.json: the rows Base and Target, and those of all generations."""
        options = self.options
        results: dict[str, Any] = {"learner": options.learner, "seed": options.seed}
        results |= {"potential": list(options.potential)} | self.row(None)
        results["generations"] = [self.row(m) for m in range(options.generations + 1)]
        if processes.rank() == 0:
            files.write_json(self.path / "results.json", results)
        return results


def count_generations(folder: Path) -> int:
    """How many generations the folder of a job holds, up to the first that is not there."""
    count = 0
    while (folder / f"generation-{count}" / ROW).exists():
        count += 1
    return count


def write_lines(path: Path, rows: list[dict]) -> None:
    files.write_text(path, "".join(json.dumps(finite_or_null(row)) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict]:
    with files.reading(path, "is no file of rows"):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def finite_or_null(value: Any) -> Any:
    """The value as JSON has it, with None in place of NaN and infinity, which JSON lacks."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: None)
