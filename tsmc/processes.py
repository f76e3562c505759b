"""One job spread over several processes: `torchrun --nproc-per-node N main.py ...`.

Every process runs the whole algorithm with the same random streams. They share two kinds of work:

    draws      each process computes its own rows, and all of them get all rows
    training   each computes the gradient of its own rows of a batch; the gradients are summed

so one step of N processes is that of a single one, up to rounding. Process 0 writes the files.
With a single process all of these functions return what they are given.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinystories.errors import InputError

PATIENCE = timedelta(hours=2)  # how long a process waits for the others


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rows(rows: int) -> slice:
    """Which of the rows of a batch this process computes; InputError where there are too few."""
    if rows < count():
        raise InputError(f"{count()} processes cannot share a batch of {rows}; start fewer")
    place = rank() if count() > 1 else 0
    return slice(place * rows // count(), (place + 1) * rows // count())


def gather(value: Any) -> list[Any]:
    """The values of all processes, in order of rank; tensors in them should be on the CPU."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def gather_rows(part: Tensor) -> Tensor:
    """The rows [N, ...] of all processes, of which this one has a part [n, ...]."""
    if count() == 1:
        return part
    return torch.cat(gather(part.detach().cpu())).to(part.device)


def first(value: Any) -> Any:
    """The value of process 0; tensors in it should be on the CPU."""
    values = [value]
    if count() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of all processes, in place."""
    if count() == 1:
        return
    parameters = list(parameters)
    has_gradient = gather([parameter.grad is not None for parameter in parameters])
    for parameter, *has in zip(parameters, *has_gradient, strict=True):
        if not any(has):  # it stays without one: AdamW decays what has a gradient of zeros
            continue
        if parameter.grad is None:  # other processes used it
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def join(device: torch.device) -> None:
    """Join the processes that torchrun has started; InputError where they do not meet."""
    if dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if is_cuda else "gloo", timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        fault = f"the processes of this job do not find each other ({reason})"
        raise InputError(f"{fault}; start it with torchrun") from error


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
