"""One job spread over several processes (`torchrun --nproc-per-node N main.py ...`), or over one, in which nothing here acts.

    gather(value)                 every process's value, in order, the same list on all
    own_rows(draw_batch)          a batch that all draw, of which each process works on its rows
    ctl_batches(...)              the same where drawing itself is the work
    share_gradients(module)       from now on backward() ends with the sum of the gradients of all processes
    compare(options)              an error on all where they are not the same on all

Every process holds the same model, the same twist and the same random streams. Of a batch each draws all the random
numbers, which costs nothing, and uses its rows of them; so the distributed job computes what the single one computes.
"""

import importlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill.batches import Batch
from tinystories.errors import InputError
from tsmc.categorical import uniforms
from tsmc.interfaces import LearnableTwist
from tsmc.sampler import Sigma
from tsmc.trajectories import trajectories
from twist.ctl import Batch as ContrastBatch
from twist.ctl import batches_from_proposal, negative_log_weights, positive_log_weights, weigh
from twist.pool import PoolBatch

ARRIVAL = timedelta(minutes=5)  # how long the first waits for the last to start
PATIENCE = timedelta(minutes=30)  # one process may score a long chunk while the others wait
T = TypeVar("T")
B = TypeVar("B", Batch, PoolBatch)


def rank() -> int:
    """Number of this process, 0 for the one that writes; torchrun has numbered them before they join."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0)) if is_one_of_many() else 0


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(total: int) -> slice:
    """The part of range(total) that is this process's."""
    return slice(total * rank() // count(), total * (rank() + 1) // count())


def wait_awake(work: dist.Work) -> None:
    """Wait for what all processes do together, so that Ctrl-C ends a process whose peers do not come."""
    while not work.is_completed():
        time.sleep(0.0002)
    work.wait()  # raises where a peer is lost


def gather(value: T) -> list[T]:
    """The values of all processes, in their order; tensors in them should be on the CPU."""
    if count() == 1:
        return [value]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)  # [bytes of this process's value]
    lengths = [length.item() for length in gather_equal(torch.tensor([len(own)], device=device))]
    padded = torch.cat([own, own.new_zeros(max(lengths) - len(own))]).to(device)
    rows = zip(gather_equal(padded), lengths, strict=True)
    return [pickle.loads(row[:length].cpu().numpy().tobytes()) for row, length in rows]


def gather_equal(own: Tensor) -> list[Tensor]:
    """A tensor of the same shape and type from every process."""
    every = [torch.empty_like(own) for _ in range(count())]
    wait_awake(dist.all_gather(every, own, async_op=True))
    return every


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all processes put together."""
    return rows if count() == 1 else torch.cat(gather(rows.cpu())).to(rows.device)


def total(value: float | Tensor) -> float:
    """A number; of a tensor, which holds this process's part of a sum, the sum over the processes."""
    return sum(gather(value.item())) if isinstance(value, Tensor) else value


def any_of(flag: bool) -> bool:
    """Whether the flag is up in any process."""
    return any(gather(flag))


def share_gradients(module: nn.Module) -> None:
    """Let every gradient be summed over the processes as soon as backward() has computed it."""

    def add(parameter: nn.Parameter) -> None:
        wait_awake(dist.all_reduce(parameter.grad, async_op=True))

    if count() > 1:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(add)


def own_rows(draw_batch: Callable[[int], B]) -> Callable[[int], B]:
    """Batches cut down to the rows of this process."""

    def draw(update: int) -> B:
        batch = draw_batch(update)
        return batch.rows(share(batch.batch_size))

    return draw


def ctl_batches(
    sigmas: Sequence[Sigma], psi: LearnableTwist, batch_size: int, generator: torch.Generator
) -> Callable[[int], ContrastBatch]:
    """`twist.ctl.batches_from_proposal`; each process simulates its rows, and the weights of all decide the coefficients."""
    if count() == 1:
        return batches_from_proposal(sigmas, psi, batch_size, generator)

    def draw(update: int) -> ContrastBatch:
        sigma, own = sigmas[update % len(sigmas)], share(batch_size)
        uniform = uniforms(sigma.model.length * batch_size, 1, generator).view(-1, batch_size, 1)
        rows = trajectories(sigma.model, psi, uniform[:, own], keep_hidden=True)
        positive = gather_rows(positive_log_weights(rows, sigma.log_potential))  # [K]
        whole = weigh(rows, positive, gather_rows(negative_log_weights(rows)))
        whole.coefficients = whole.coefficients[own]
        return whole

    return draw


def is_one_of_many() -> bool:
    """Whether torchrun has started this process, beside others."""
    return (os.environ.get("WORLD_SIZE") or "1") != "1"


def join(device: torch.device) -> None:
    """Join the processes that torchrun has started beside this one; InputError where they do not find each other.

    Until all have come, Ctrl-C ends the process at once: nothing in Python could see it.
    """
    if dist.is_initialized() or not is_one_of_many():
        return
    # The optimizers load this module late, and its default arguments would then keep the group: leave() could not end
    # the group's threads, and one that still works while the interpreter ends aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        store, number, total = next(dist.rendezvous("env://", timeout=ARRIVAL))
        store.set_timeout(PATIENCE)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=number, world_size=total, timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        reason = f"the processes of this job do not find each other ({str(error).splitlines()[0]})"
        raise InputError(f"{reason}; start it with torchrun") from error
    finally:
        signal.signal(signal.SIGINT, handler)


def compare(options: dict[str, str]) -> None:
    """InputError on all processes where they do not have the same values; it names those that differ."""
    values = gather(options)
    if differing := [name for name in options if any(other.get(name) != options[name] for other in values)]:
        raise InputError(f"the processes of this job differ in {', '.join(differing)}; start all of them alike")


def is_lost(error: Exception) -> bool:
    """Whether an error means that another process of the job is gone."""
    words = ("peer", "gloo", "nccl")
    return count() > 1 and (isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words))


def leave() -> None:
    """Leave the other processes without waiting for them."""
    if dist.is_initialized():
        dist.destroy_process_group()
