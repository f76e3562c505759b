"""A run of `main.py`: its directory, and its phases, each computed once.

    resume/NAME.safetensors    the tensors that a phase has computed; in the metadata which phase of
                               which run it is, its lines of metrics.jsonl, and the sha256 of both

A run is a fixed sequence of phases. `once` returns what a phase has computed: from its file where
an earlier process has finished it, else by computing it. A phase draws from a random stream of its
own, so one that was interrupted is simply run again and gives the same result. Several processes
share what is drawn; process 0 trains, and writes, while it holds `.lock`. docs/options.md lists the
files.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from eval.run import processes
from eval.run.command import say
from eval.run.options import RunConfig
from eval.run.progress import Place, Progress, name_of
from tinystories import checkpoint
from tinystories.errors import InputError
from tsmc.interfaces import Report
from tsmc.runs import Compute, Draw, Phases, chunk_sizes, joined

LOCK, SECONDS = ".lock", "seconds.json"


def digest_of_phase(tensors: dict[str, Tensor], records: str) -> str:
    """sha256 of the records, and of the names, types, shapes and values of the tensors."""
    return hashlib.sha256(records.encode() + save(tensors)).hexdigest()


def write_phase(path: Path, tensors: dict[str, Tensor], identity: str, records: list[dict]) -> None:
    """Write what a phase has computed; `identity` says which phase of which run it is."""
    lines = json.dumps(records)
    sha256 = digest_of_phase(tensors, lines)
    checkpoint.write_tensors(path, tensors, identity=identity, records=lines, sha256=sha256)


def read_phase(path: Path, identity: str) -> tuple[dict[str, Tensor], list[dict]]:
    """Tensors and records of a phase; InputError for a file that is damaged or of another phase."""
    with checkpoint.reading(path, "cannot be read", "delete it to repeat its phase"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["identity"] != identity:
            raise ValueError("it belongs to another phase or run")
        if metadata["sha256"] != digest_of_phase(tensors, metadata["records"]):
            raise ValueError("it has changed since it was written")
        return tensors, json.loads(metadata["records"])


class Run(Phases, contextlib.AbstractContextManager):
    """The phases of a run in its directory, which is locked inside the `with` block."""

    def __init__(self, config: RunConfig, resumed: Path | None, networks: dict[str, str]):
        """A new run, or the one in the directory `resumed`; InputError where it cannot be.

        `networks` names by hash what else the results depend on.
        """
        super().__init__(config.seed, config.torch_device(), config.rows)
        self.writes = processes.rank() == 0
        self.progress = Progress(self.writes and not config.quiet)
        self.seconds: list[dict] = []  # of each phase, in seconds.json
        self.records: list[dict] = []  # the lines of metrics.jsonl
        self.samples: list[dict] = []  # the lines of samples.jsonl
        self.phases: list[Path] = []
        options = dataclasses.asdict(dataclasses.replace(config, out="", quiet=False))
        self.identity = json.dumps(options | networks, sort_keys=True)
        if len(set(processes.gather(self.identity))) > 1:
            raise InputError("the processes of this job have different options; start them alike")
        self.lock: filelock.BaseFileLock | None = None  # held by the process that writes
        is_new = resumed is None
        directory = new_directory(config) if is_new and self.writes else resumed
        self.directory = processes.first(directory)
        if not self.writes:
            return
        self.lock = filelock.FileLock(self.directory / LOCK, timeout=0)
        try:
            self.lock.acquire()
        except filelock.Timeout:
            fault = f"{self.directory}: another process is writing there"
            raise InputError(f"{fault}; wait or stop it") from None
        self.own_lock = (self.directory / LOCK).stat()
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        made_by = {"versions": versions, "networks": networks}
        if is_new:
            checkpoint.write_json(self.path / "config.json", dataclasses.asdict(config) | made_by)
        else:
            self.compare_with(made_by)
            with contextlib.suppress(InputError):  # no result depends on it
                self.seconds = read_seconds(self.path)
        for folder in ("", "resume", "target", "figures", "generation-*"):
            for partial in self.path.glob(f"{folder}/.*{checkpoint.PARTIAL}".lstrip("/")):
                partial.unlink(missing_ok=True)

    def compare_with(self, made_by: dict) -> None:
        """InputError where networks have changed since the run began; a line for other versions."""
        saved = checkpoint.read_json(self.path / "config.json")
        if saved.get("networks") != made_by["networks"]:
            fault = f"{self.path}: a network or potential has changed since the run began"
            raise InputError(f"{fault}; restore it or start a new run")
        if saved.get("versions") != made_by["versions"]:
            self.say(f"begun with {saved.get('versions')}, so results may differ in rounding")

    @property
    def path(self) -> Path:
        """The directory to write to; InputError where it is no longer the one that was locked."""
        lock = self.directory / LOCK
        if self.lock and not (lock.exists() and os.path.samestat(lock.stat(), self.own_lock)):
            fault = f"{self.directory}: was moved, deleted or replaced while its run wrote there"
            raise InputError(f"{fault}; put it back and continue with --resume")
        return self.directory

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.writes:
            self.lock.release()
            self.lock = None
        if isinstance(error, KeyboardInterrupt):
            message = f"interrupted; continue with --resume {self.directory}"
            raise KeyboardInterrupt(message) from error

    def once(self, phase: str, m: int | None, steps: int, compute: Compute) -> dict[str, Tensor]:
        """The tensors of a phase, which process 0 computes."""

        def compute_there(generator: torch.Generator, report: Report) -> dict[str, Tensor]:
            return compute(generator, report) if self.writes else {}

        return self.kept(phase, m, steps, compute_there)

    def kept(self, phase: str, m: int | None, steps: int, compute: Compute) -> dict[str, Tensor]:
        """The tensors of a phase, from its file or computed by all processes together."""
        place = "start" if m is None else str(m)
        name = f"{place}-{phase.replace(' ', '-')}"
        path = self.path / "resume" / f"{name}.safetensors"
        self.phases.append(path)
        identity = hashlib.sha256(f"{name} {self.identity}".encode()).hexdigest()
        if processes.first(path.exists()):
            tensors, records = read_phase(path, identity)
        else:
            tensors, records = self.computed((phase, m), steps, compute)
            if self.writes:
                write_phase(path, tensors, identity, records)
                checkpoint.write_json(self.path / SECONDS, {"phases": self.seconds})
        self.records += records
        self.write_lines("metrics.jsonl", self.records)
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def computed(
        self, place: Place, steps: int, compute: Compute
    ) -> tuple[dict[str, Tensor], list[dict]]:
        """What process 0 computes in a phase, on the CPU, and its records."""
        self.progress.begin(place, steps)
        try:
            tensors = compute(self.stream(*place), self.progress)
        except InputError as error:
            self.progress.clear()
            raise InputError(f"{name_of(place)}: {error}") from error
        tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        seconds = round(self.progress.end(), 2)
        self.seconds.append({"phase": place[0], "generation": place[1], "seconds": seconds})
        return processes.first(tensors), self.progress.records

    def draw(
        self, phase: str, m: int | None, total: int, draw: Draw, particles: int = 1
    ) -> dict[str, Tensor]:
        """A phase that draws a sample in chunks, which the processes share."""
        sizes = chunk_sizes(total, self.rows // particles)

        def compute(generator: torch.Generator, report: Report) -> dict[str, Tensor]:
            parts = []
            for first in range(0, len(sizes), processes.count()):
                number = min(first + processes.rank(), len(sizes) - 1)
                part = draw(sizes[number], self.stream(phase, m, number))
                together = processes.gather({name: value.cpu() for name, value in part.items()})
                for drawn in together[: len(sizes) - first]:
                    figures = {"ess": drawn["ess"].mean().item()} if "ess" in drawn else {}
                    report(**figures)
                    parts.append(drawn)
            return joined(parts)

        return self.kept(phase, m, len(sizes), compute)

    def add_samples(self, rows: list[dict]) -> None:
        """Add rows to samples.jsonl."""
        self.samples += finite_or_null(rows)
        self.write_lines("samples.jsonl", self.samples)

    def write_lines(self, name: str, rows: list[dict]) -> None:
        """Write a file anew as a whole, a line for each row."""
        if self.writes:
            checkpoint.write_text(self.path / name, "".join(json.dumps(row) + "\n" for row in rows))

    def say(self, line: str, is_progress: bool = False) -> None:
        """A line on standard error, of one process; with --quiet, progress is left out."""
        if self.writes and (self.progress.is_shown or not is_progress):
            self.progress.clear()
            say(line)

    def finish(self, results: dict) -> None:
        """Write results.json and remove the files of the phases, which are no longer needed."""
        processes.gather(None)  # other processes may still be reading them
        if self.writes:
            checkpoint.write_json(self.path / "results.json", finite_or_null(results))
            for path in self.phases:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something of the user's is in the folder
                (self.path / "resume").rmdir()


def read_seconds(run: Path) -> list[dict]:
    """The phases that a run has computed, with the seconds of each; InputError for a bad file."""
    path = run / SECONDS
    raw = checkpoint.read_json(path)
    with checkpoint.reading(path, "holds no seconds of phases", "delete it"):
        names = {"phase": str, "generation": int | None, "seconds": float}
        rows = [{name: row[name] for name in names} for row in raw["phases"]]
        if not all(isinstance(row[name], names[name]) for row in rows for name in names):
            raise TypeError("an entry is of another type")
        return rows


def new_directory(config: RunConfig) -> Path:
    """The directory of --out, or else a new one in runs/; InputError where it exists already."""
    path = Path(config.out or f"runs/{config.preset}")
    number = 1
    while not config.out and path.exists():
        number += 1
        path = Path(f"runs/{config.preset}-{number}")
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        fault = f"--out {path}: exists already"
        raise InputError(f"{fault}; choose another, or continue its run with --resume") from None
    return path


def finite_or_null(value: Any) -> Any:
    """The value as JSON has it, with None in place of NaN and infinity, which JSON lacks."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: None)
