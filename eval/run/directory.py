"""A run's directory.

    config.json     every option, versions, seed          metrics.jsonl   one line per step of every phase
    results.json    the final table                       samples.jsonl   texts with scores, by source and TSMC run
    generation-m/   model, tokenizer, twist               figures/        PNG
    resume/         states of the phases, until the run has finished

JSON files and checkpoints are written whole or not at all; `metrics.jsonl` grows by whole lines and is rebuilt when a run is
continued. Of several processes one writes. A lock on the directory keeps two runs from writing into it.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import platform
import shutil
import signal
import sys
from pathlib import Path

import filelock
import numpy
import torch

from eval.run import processes
from eval.run.state import digest_of, read_state, write_state
from tinystories.checkpoint import write_json, write_text
from tinystories.errors import InputError


class RunDirectory:
    """Where a run writes; made by `create` or taken up again by `resume`, and locked until its `with` block ends.

    Inside the block SIGINT and SIGTERM end the run between two steps of a phase, after saving.
    """

    def __init__(self, path: Path, device: torch.device, save_every: float, identity: str):
        """`identity` is a hash of everything that the results depend on; saved states carry it."""
        self.path, self.device, self.save_every, self.identity = Path(path), device, save_every, identity
        self.writes = processes.rank() == 0
        self.interrupted = False  # every phase looks at it between steps
        self.samples: list[dict] = []
        if self.writes:
            self.lock = lock_directory(self.path)
            try:
                self.metrics = open(self.path / "metrics.jsonl", "w", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise InputError(f"{path}: cannot be written ({error.strerror}); choose another directory") from error

    def __enter__(self) -> "RunDirectory":
        self.handlers = {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.writes:
            with contextlib.suppress(OSError):  # a full disk has been reported when the line was written
                self.metrics.close()
            self.lock.release()

    @classmethod
    def create(cls, config, identity: dict[str, str]) -> "RunDirectory":
        """A directory that did not exist before, with config.json in it; `identity` names what else the results depend on.

        InputError where it exists or cannot be made.
        """
        path = Path(config.out) if config.out else free_name(Path("runs"), config.preset)
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
        if processes.rank() == 0:
            try:
                path.mkdir(parents=True, exist_ok=False)
            except FileExistsError:
                words = "exists already; choose another directory, or continue its run with --resume"
                raise InputError(f"--out {path}: {words}") from None
            except OSError as error:
                raise InputError(f"--out {path}: cannot be written ({error.strerror}); choose another") from error
            write_json(path / "config.json", dataclasses.asdict(config) | {"versions": versions})
            start = identity | {"versions": versions, "config.json": digest_of(path / "config.json")}
            write_state(path / "resume" / "start", start)
        return cls(path, config.torch_device(), config.save_every, hash_of(identity))

    @classmethod
    def resume(cls, path: Path, config, identity: dict[str, str]) -> "RunDirectory":
        """The directory of a run that was cut off; InputError where what it started from has changed."""
        start = read_state(path / "resume" / "start", torch.device("cpu"))
        for name, digest in (identity | {"config.json": digest_of(path / "config.json")}).items():
            if start.get(name) != digest:
                raise InputError(f"{path}: {name} has changed since the run began; restore it or start a new run")
        directory = cls(path, config.torch_device(), config.save_every, hash_of(identity))
        if directory.writes:
            remove_left_overs(path)
        return directory

    def interrupt(self, number: int, frame: object) -> None:
        """Ask the current phase to save and stop after its step; asked twice, stop at once."""
        if self.interrupted:
            raise KeyboardInterrupt(f"interrupted; continue from the last saved state with --resume {self.path}")
        self.interrupted = True
        if self.writes:
            print("stopping after this step; again to stop at once", file=sys.stderr, flush=True)

    def finish(self, results: list[dict], keep_states: bool = False) -> None:
        """Write results.json, a list only for several prompts; the states of the phases are no longer needed."""
        if self.writes:
            whole = results[0] if len(results) == 1 else {"prompts": results}
            write_json(self.path / "results.json", finite_or_null(whole))
            if not keep_states:
                shutil.rmtree(self.path / "resume")

    def log(self, record: dict) -> None:
        """One line of metrics.jsonl; InputError where the disk is full."""
        if not self.writes:
            return
        try:
            self.metrics.write(json.dumps(record) + "\n")
            self.metrics.flush()
        except OSError as error:
            words = f"cannot be written ({error.strerror}); free space, then continue with --resume {self.path}"
            raise InputError(f"{self.path / 'metrics.jsonl'}: {words}") from error

    def read_metrics(self) -> list[dict]:
        """Every record so far."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def add_samples(self, rows: list[dict]) -> None:
        """More rows of samples.jsonl, which is written anew as a whole."""
        self.samples += finite_or_null(rows)
        if self.writes:
            write_text(self.path / "samples.jsonl", "".join(json.dumps(row) + "\n" for row in self.samples))


def lock_directory(path: Path) -> filelock.BaseFileLock:
    """Hold a directory against other processes; InputError where one is writing there or nobody can."""
    lock = filelock.FileLock(path / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise InputError(f"{path}: another process is writing there; wait for it or stop it") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another directory") from error
    return lock


def hash_of(identity: dict[str, str]) -> str:
    """One hash for all that a run's results depend on."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def remove_left_overs(path: Path) -> None:
    """Remove the temporary files that were being written when a process was killed."""
    for pattern in (".*.*", ".tmp*"):
        for left_over in path.rglob(pattern):
            left_over.unlink(missing_ok=True)


def free_name(parent: Path, stem: str) -> Path:
    """The first of stem, stem-2, stem-3, ... that is free."""
    number = 1
    while (path := parent / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return path


def finite_or_null(value):
    """Lists and dictionaries with None in the place of NaN and infinity, which JSON does not know: log phi = -inf."""
    if isinstance(value, dict):
        return {name: finite_or_null(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite_or_null(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
