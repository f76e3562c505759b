"""One job spread over several processes: `torchrun --nproc-per-node N main.py ...`.

All have the same model, twist and random streams, so the job computes what a single process does up
to float rounding, until rounding changes a draw. With a single process all of these are no-ops.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinystories.errors import InputError

PATIENCE = timedelta(minutes=30)  # one process may score a long chunk while the others wait


def rank() -> int:
    """The number of this process; process 0 writes the files."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(total: int) -> slice:
    """The part of range(total) that belongs to this process."""
    return slice(total * rank() // count(), total * (rank() + 1) // count())


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


def total(value: float | Tensor) -> float:
    """A number as it is; of a tensor, which holds this process's part of a sum, the whole sum."""
    return sum(gather(value.item())) if isinstance(value, Tensor) else value


def share_gradients(module: nn.Module) -> None:
    """Sum every gradient over the processes as soon as backward() has computed it."""
    for parameter in module.parameters():
        if count() > 1 and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda own: dist.all_reduce(own.grad))


def all_rows(rows: Tensor) -> Tensor:
    """The rows of all processes, of which `rows` [n, ...] are those of this one."""
    return torch.cat(gather(rows.cpu())).to(rows.device)


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
