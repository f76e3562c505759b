"""Several processes: one job may be spread over them by `torchrun --nproc-per-node N main.py ...`.

Every process runs the whole algorithm with the same random streams. Each draws and scores its share
of the rows of a sample, the results are gathered, and then all learn the same; after each
generation `align` removes the differences that rounding has made between them. Process 0 writes the
files, and a single process does all of it alone. N rows.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

PATIENCE = timedelta(hours=2)  # how long a process waits for the others


def rank() -> int:
    """The number of this process; 0 in one that has not joined a job."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def join(device: torch.device) -> None:
    """Join the processes that torchrun has started; ValueError where they do not meet."""
    if dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        fault = f"the processes of this job do not meet ({str(error).splitlines()[0]})"
        raise ValueError(f"{fault}; start it with torchrun") from error


def leave() -> None:
    """The end of what `join` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(value: Any) -> list[Any]:
    """The values of all processes, in order of rank; tensors in them should be on the CPU."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def of_first(value: Any) -> Any:
    """The value of process 0; tensors in it should be on the CPU."""
    return gather(value)[0]


def own_rows(rows: int) -> slice:
    """Which of the rows of a batch this process draws; ValueError where there are too few."""
    if rows < count():
        raise ValueError(f"{count()} processes cannot share a batch of {rows}; start fewer")
    return slice(rank() * rows // count(), (rank() + 1) * rows // count())


def gather_rows(part: Any) -> Any:
    """The rows [N, ...] of all processes, of which this one has a part [n, ...]; None of None."""
    if count() == 1 or part is None:
        return part
    return torch.cat(gather(part.detach().cpu())).to(part.device)


def align(modules: Iterable[Any]) -> None:
    """Give the tensors of these modules the values of process 0."""
    for module in modules:
        if count() > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)


def progress(steps: Iterable | int, title: str, m: int | None = None) -> tqdm:
    """The steps with a bar on a terminal, and elsewhere a line as they begin, in process 0 alone; a
    number stands for its range."""
    steps = range(steps) if isinstance(steps, int) else steps
    title = title if m is None else f"generation {m}, {title}"
    is_shown = rank() == 0 and sys.stderr.isatty()
    if rank() == 0 and not is_shown:
        with contextlib.suppress(OSError):  # nobody reads it
            print(title, file=sys.stderr, flush=True)
    return tqdm(steps, desc=title, leave=False, disable=not is_shown)
