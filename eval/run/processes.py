"""One job spread over several processes: `torchrun --nproc-per-node N main.py ...`.

    gather(value)              every process's value, in order of rank, on all of them
    own_rows(draw_batch)       a batch that all processes draw, of which each works on its rows
    ctl_batches(...)           the same where drawing itself is the work
    share_gradients(module)    from now on backward() ends with the sum of all processes' gradients

Every process holds the same model, the same twist and the same random streams, so the job computes
what a single process computes up to float rounding, until rounding changes a draw. With a single
process all of these are no-ops.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinystories.errors import InputError
from tinystories.fast import pack
from tsmc.proposal import sample_proposal
from tsmc.sampler import Sigma
from twist import ctl

PATIENCE = timedelta(minutes=30)  # one process may score a long chunk while the others wait


def rank() -> int:
    """Number of this process; process 0 writes the files."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(total: int) -> slice:
    """The part of range(total) that belongs to this process."""
    return slice(total * rank() // count(), total * (rank() + 1) // count())


def gather(value: Any) -> list[Any]:
    """The values of all processes, in order of rank; tensors in them should be on the CPU."""
    if count() == 1:
        return [value]
    values = [None] * count()
    dist.all_gather_object(values, value)
    return values


def total(value: float | Tensor) -> float:
    """A number as it is; of a tensor, which holds this process's part of a sum, the whole sum."""
    return sum(gather(value.item())) if isinstance(value, Tensor) else value


def share_gradients(module: nn.Module) -> None:
    """Sum every gradient over the processes as soon as backward() has computed it."""

    def add(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)

    if count() > 1:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(add)


def own_rows(draw_batch: Callable[[int], Any]) -> Callable[[int], Any]:
    """Batches cut down to the rows of this process."""

    def draw_own(update: int) -> Any:
        batch = draw_batch(update)
        return batch.rows(share(batch.batch_size))

    return draw_own


def ctl_batches(
    sigma: Sigma, twist: nn.Module, batch_size: int, generator: torch.Generator
) -> Callable[[], ctl.Batch]:
    """`twist.ctl.batches_from_proposal` for several processes.

    Each process simulates its own rows; the weights of all rows decide the coefficients.
    """
    if count() == 1:
        return ctl.batches_from_proposal(sigma, twist, batch_size, generator)
    own = share(batch_size)

    def all_rows(rows: Tensor) -> Tensor:
        return torch.cat(gather(rows.cpu())).to(rows.device)

    def draw_batch() -> ctl.Batch:
        psi = pack(twist)
        rows = sample_proposal(sigma.model, psi, batch_size, generator, keep_hidden=True, part=own)
        positive = all_rows(ctl.positive_log_weights(rows, sigma.log_potential))  # [K]
        batch = ctl.weigh(rows, positive, all_rows(ctl.negative_log_weights(rows)))
        batch.coefficients = batch.coefficients[own]
        return batch

    return draw_batch


def join(device: torch.device) -> None:
    """Join the processes that torchrun has started; InputError where they do not meet."""
    if dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
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
