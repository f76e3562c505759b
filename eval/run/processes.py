"""One job spread over several processes: `torchrun --nproc-per-node N main.py ...`.

The processes share what is drawn, and process 0 alone trains, while the others wait. So the job
computes what a single process does, up to the rounding of different machines. With a single process
all of these are no-ops.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tinystories.errors import InputError

PATIENCE = timedelta(days=2)  # the others wait while process 0 trains


def rank() -> int:
    """The number of this process; process 0 writes the files."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """The values of all processes, in order of rank; tensors in them should be on the CPU."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def first(value: Any) -> Any:
    """The value of process 0; tensors in it should be on the CPU."""
    values = [value]
    if count() > 1:
        dist.broadcast_object_list(values)
    return values[0]


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


def is_lost(error: RuntimeError) -> bool:
    """Whether an error means that another process of the job has ended; gloo has no type for it."""
    return count() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
