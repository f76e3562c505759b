"""One phase of a run on disk, and its progress on screen.

    resume/NAME.safetensors    the tensors that the phase has computed; in the metadata the phase
                               and run, its lines of metrics.jsonl, and the sha256 of both

A phase draws from a random stream of its own, so one that was interrupted can simply be run again
and gives the same result. The file is written whole when the phase has finished.
"""

import hashlib
import json
import math
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from eval.run import processes
from tinystories.checkpoint import reading, write_tensors
from tinystories.errors import InputError


def digest_of_phase(tensors: dict[str, Tensor], records: str) -> str:
    """sha256 of the records, and of the names, types, shapes and values of the tensors."""
    return hashlib.sha256(records.encode() + save(tensors)).hexdigest()


def write_phase(path: Path, tensors: dict[str, Tensor], identity: str, records: list[dict]) -> None:
    """Write what a phase has computed; `identity` says which phase of which run it is."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    lines = json.dumps(records)
    sha256 = digest_of_phase(tensors, lines)
    write_tensors(path, tensors, identity=identity, records=lines, sha256=sha256)


def read_phase(
    path: Path, identity: str, device: torch.device
) -> tuple[dict[str, Tensor], list[dict]]:
    """Tensors and records of a phase; InputError for a file that is damaged or of another phase."""
    with reading(path, "cannot be read", "delete it to repeat its phase"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["identity"] != identity:
            raise ValueError("it belongs to another phase or run")
        if metadata["sha256"] != digest_of_phase(tensors, metadata["records"]):
            raise ValueError("it has changed since it was written")
        records = json.loads(metadata["records"])
    return {name: tensor.to(device) for name, tensor in tensors.items()}, records


class Progress:
    """A report (`tsmc.interfaces.Report`) that shows a phase's steps and keeps their figures."""

    def __init__(self, title: str, place: dict, total: int, is_shown: bool):
        """`title` is shown; `place` opens each record: the names of phase and generation."""
        self.place = place
        self.records: list[dict] = []
        interval = 0.1 if sys.stderr.isatty() else 5.0  # seconds
        self.bar = tqdm(total=total, desc=title, mininterval=interval, disable=not is_shown)

    def __call__(self, **figures: float | Tensor) -> None:
        """Record the figures of one step, tensors summed over processes; InputError for NaN."""
        summed = {name: processes.total(value) for name, value in figures.items()}
        step = len(self.records) + 1
        for name, value in summed.items():
            if not math.isfinite(value):
                raise InputError(f"step {step}: {name} is {value}; lower the learning rate")
        self.records.append({**self.place, "step": step, **summed})
        self.bar.set_postfix({name: f"{summed[name]:.3g}" for name in summed}, refresh=False)
        self.bar.update()
