"""A run's directory.

    config.json     every option, versions, seed          metrics.jsonl   one line per step of every phase
    results.json    the final table                       samples.jsonl   texts with scores, by source and TSMC run
    generation-m/   model, tokenizer, twist               figures/        PNG
    resume/         states of the phases, until the run has finished           .lock           held by who writes

JSON files and checkpoints are written whole or not at all; `metrics.jsonl` grows by whole lines and is rebuilt when a run is
continued. Of several processes one writes. A lock on the directory keeps two runs from writing into it.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import platform
import re
import shutil
import signal
from pathlib import Path

import filelock
import numpy
import torch

from eval.run import processes
from eval.run.command import say
from eval.run.options import RunConfig
from eval.run.state import digest_of, read_state, write_state
from tinystories.checkpoint import write_json, write_text
from tinystories.errors import InputError
from tinystories.interrupts import MAIN

LATER = {"lora": ((1, "sampling"),), "effective_potential": ((1, "sampling"), (1, "distillation"))}
"""Options that matter from generation 1 on, and its phases in which they do not matter yet."""
CODE = ("tinystories", "tsmc", "twist", "distill", "eval")  # folders
LEFT_OVER = re.compile(
    r"\.(.+\.(json|jsonl|safetensors|png|svg|csv|html)|(start|\d+)[a-z\d-]*)\.[a-z\d_]{8}|\.tmp\w{6}"
)
"""Names of the temporary files of `tinystories.checkpoint.replacing`, and of those that safetensors writes in their place."""


class RunDirectory:
    """Where a run writes; made by `create` or taken up again by `resume`, and locked until its `with` block ends.

    Inside the block SIGINT and SIGTERM end the run between two steps of a phase, after saving.
    """

    def __init__(self, path: Path, config: RunConfig, identity: dict[str, str]):
        """`identity` names what else than its options the run's results depend on; saved states carry a hash of both."""
        self.path, self.device, self.save_every = Path(path), config.torch_device(), config.save_every
        self.identity = dataclasses.asdict(config) | {"out": "", "keep_states": False, "quiet": False} | identity
        self.writes, self.quiet = processes.rank() == 0, config.quiet
        self.interrupted = False  # every phase looks at it between steps
        self.phase = ""  # the last that was begun, and its step if one is being taken
        self.plan: list[float] = []  # work of every phase that there is to be; empty where nobody knows
        self.begun = 0  # phases
        self.worked = 0.0  # work done by this process
        self.since: float | None = None  # when it began its first phase
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

    def __exit__(self, kind: type | None, error: Exception | None, trace: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.writes:
            with contextlib.suppress(OSError):  # a full disk has been reported when the line was written
                self.metrics.close()
            self.lock.release()
        if isinstance(error, InputError) and self.phase and self.phase not in str(error):
            raise InputError(f"{self.phase}: {error}") from error

    @classmethod
    def create(cls, config: RunConfig, identity: dict[str, str]) -> "RunDirectory":
        """A directory that did not exist before, with config.json in it; InputError where it exists or cannot be made."""
        path = processes.gather(Path(config.out) if config.out else free_name(Path("runs"), config.preset))[0]
        if processes.rank() == 0:
            try:
                path.mkdir(parents=True, exist_ok=False)
            except FileExistsError:
                is_run = (path / "resume" / "start").exists() or (path / "results.json").exists()
                remedy = "choose another directory" + (", or continue its run with --resume" if is_run else "")
                raise InputError(f"--out {path}: exists already; {remedy}") from None
            except OSError as error:
                raise InputError(f"--out {path}: cannot be written ({error.strerror}); choose another") from error
            made_with = {"versions": versions()}
            write_json(path / "config.json", dataclasses.asdict(config) | made_with)
            start = identity | made_with | {"config.json": digest_of(path / "config.json")}
            write_state(path / "resume" / "start", start)
        return cls(path, config, identity)

    @classmethod
    def resume(cls, path: Path, config: RunConfig, identity: dict[str, str]) -> "RunDirectory":
        """The directory of a run that was cut off; InputError where what it started from has changed."""
        remedy = "this run cannot be continued; delete its directory and start it again"
        start = read_state(path / "resume" / "start", torch.device("cpu"), remedy)
        for name, digest in (identity | {"config.json": digest_of(path / "config.json")}).items():
            if start.get(name) != digest:
                raise InputError(f"{path}: {name} has changed since the run began; restore it or start a new run")
        directory = cls(path, config, identity)
        if directory.writes:
            remove_left_overs(path)
            if (began := start["versions"]) != (now := versions()):
                say(f"this run began with {began} and goes on with {now}, which may change its results a little")
        return directory

    def identity_of(self, generation: int | None, name: str) -> str:
        """A hash of everything that a phase depends on."""
        early = {
            option: None
            for option, phases in LATER.items()
            if not generation or (generation, name.split()[0]) in phases
        }
        return hashlib.sha256(json.dumps(self.identity | early, sort_keys=True).encode()).hexdigest()

    def interrupt(self, number: int, frame: object) -> None:
        """Ask the current phase to save and stop after its step; asked twice, stop at once."""
        if self.interrupted:
            raise KeyboardInterrupt(f"interrupted; continue from the last saved state with --resume {self.path}")
        self.interrupted = True
        if self.writes:
            say("stopping after this step; again to stop at once")

    def finish(self, results: list[dict], keep_states: bool = False) -> None:
        """Write results.json, a list only for several prompts; the states of the phases are no longer needed."""
        processes.gather(None)  # others may still be reading them
        if self.writes:
            whole = results[0] if len(results) == 1 else {"prompts": results}
            write_json(self.path / "results.json", finite_or_null(whole))
            if not keep_states:
                shutil.rmtree(self.path / "resume", ignore_errors=True)

    def log(self, record: dict) -> None:
        """One line of metrics.jsonl; InputError where the disk is full."""
        if not self.writes:
            return
        try:
            self.metrics.write(json.dumps(record) + "\n")
            self.metrics.flush()
        except OSError as error:
            fault = f"cannot be written ({error.strerror}); free space, then continue with --resume {self.path}"
            raise InputError(f"{self.path / 'metrics.jsonl'}: {fault}") from error

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


def versions() -> dict[str, str]:
    """Of what numbers come from; the code by a hash of its Python files."""
    files = [MAIN, *(path for folder in CODE for path in (MAIN.parent / folder).rglob("*.py"))]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:12]
    libraries = {"torch": str(torch.__version__), "numpy": numpy.__version__}
    return {"code": code, "python": platform.python_version(), **libraries}


def is_finished(path: Path, config: RunConfig) -> bool:
    """Whether a run has its results; states that it was killed over are removed then."""
    if (path / "results.json").exists():
        if not config.keep_states and processes.rank() == 0:
            shutil.rmtree(path / "resume", ignore_errors=True)
        return True
    return False


def remove_left_overs(path: Path) -> None:
    """Remove the temporary files that were being written when a process was killed."""
    for file in path.rglob(".*"):
        if LEFT_OVER.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


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
