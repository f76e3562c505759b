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
from tinystories.checkpoint import reading, replacing
from tinystories.errors import InputError

SECONDS = 5.0  # between updates of the progress where standard error is not a terminal
REMEDY = "delete it to repeat its phase"


def digest_of_phase(tensors: dict[str, Tensor], records: str) -> str:
    """sha256 of the records, and of the names, types, shapes and values of the tensors."""
    digest = hashlib.sha256(records.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def write_phase(path: Path, tensors: dict[str, Tensor], identity: str, records: list[dict]) -> None:
    """Write what a phase has computed; `identity` says which phase of which run it is."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"identity": identity, "records": json.dumps(records)}
    metadata["sha256"] = digest_of_phase(tensors, metadata["records"])
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, metadata))


def read_phase(
    path: Path, identity: str, device: torch.device
) -> tuple[dict[str, Tensor], list[dict]]:
    """Tensors and records of a phase; InputError for a file that is damaged or of another phase."""
    with reading(path, "cannot be read", REMEDY), safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        records = json.loads(metadata["records"])
        if metadata["identity"] != identity:
            raise ValueError("it belongs to another phase or run")
        if metadata["sha256"] != digest_of_phase(tensors, metadata["records"]):
            raise ValueError("it has changed since it was written")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, records


class Progress:
    """A report (`tsmc.interfaces.Report`) that shows a phase's steps and keeps their figures."""

    def __init__(self, title: str, place: dict, total: int, is_shown: bool):
        """`title` is shown; `place` opens each record: the names of phase and generation."""
        self.place = place
        self.records: list[dict] = []
        interval = 0.1 if sys.stderr.isatty() else SECONDS
        self.bar = tqdm(total=total, desc=title, mininterval=interval, disable=not is_shown)

    def __call__(self, **figures: float | Tensor) -> None:
        """Record the figures of one step; a tensor is this process's part of a sum.

        InputError where a figure is not finite.
        """
        summed = {name: processes.total(value) for name, value in figures.items()}
        step = len(self.records) + 1
        for name, value in summed.items():
            if not math.isfinite(value):
                raise InputError(f"step {step}: {name} is {value}; lower the learning rate")
        self.records.append({**self.place, "step": step, **summed})
        shown = {name: f"{value:.3g}" for name, value in summed.items()}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
