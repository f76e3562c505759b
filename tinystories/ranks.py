"""One job spread over several processes (`torchrun --nproc-per-node N main.py ...`), or over one, in which nothing here acts.

    mine = share(total)              the rows that this process works on, a slice of range(total)
    whole = gather(part, total)      every process's rows put together, the same on all [total, ...]
    add_gradients(parameters)        gradients summed over the processes

Every process holds the same model, the same twist and the same random streams. Of a batch each draws all the random
numbers, which costs nothing, and uses its rows of them; so the distributed job computes what the single one computes.
"""

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(minutes=30)  # one process may score a long chunk while the others wait


def rank() -> int:
    """Number of this process, 0 for the one that writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(total: int) -> slice:
    """The part of range(total) that is this process's."""
    return slice(total * rank() // count(), total * (rank() + 1) // count())


def gather(part: Tensor, total: int) -> Tensor:
    """Rows [total, ...] of all processes, of which this one has computed part = rows[share(total)]."""
    if count() == 1:
        return part
    whole = part.new_zeros(total, *part.shape[1:])
    whole[share(total)] = part
    dist.all_reduce(whole)
    return whole


def add_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum the gradients of all processes, in place."""
    if count() > 1:
        for parameter in parameters:
            dist.all_reduce(parameter.grad)


def join(device: torch.device) -> None:
    """Join the processes that torchrun has started, if it has started this one."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
