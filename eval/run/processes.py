"""One job spread over several processes (`torchrun --nproc-per-node N main.py ...`), or over one, in which nothing here acts.

    mine = share(total)                  the rows that this process works on, a slice of range(total)
    whole = gather(part, total)          every process's rows put together, the same on all [total, ...]
    whole = one_each(step, sizes, work)  the same of whole chunks, each with a random stream of its own
    add_gradients(parameters)            gradients summed over the processes

Every process holds the same model, the same twist and the same random streams. Of a batch each draws all the random
numbers, which costs nothing, and uses its rows of them; so the distributed job computes what the single one computes.
"""

import os
from collections.abc import Callable, Iterable, Sequence
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


def gather(part: Tensor, total: int, mine: slice | None = None) -> Tensor:
    """Rows [total, ...] of all processes, of which this one has computed part = rows[mine]; mine is share(total) if None."""
    if count() == 1:
        return part
    whole = part.new_zeros(total, *part.shape[1:])
    whole[share(total) if mine is None else mine] = part
    dist.all_reduce(whole)
    return whole


def chunk_sizes(total: int, at_once: int) -> list[int]:
    """Sizes of the chunks that `total` rows are worked on in: at_once each, and what is left over."""
    return [min(at_once, total - done) for done in range(0, total, at_once)]


def rounds(chunks: int) -> int:
    """How often all processes work on one chunk each until all chunks are done."""
    return -(-chunks // count())


def one_each(step: int, sizes: Sequence[int], work: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Chunks step N, step N + 1, ... of N processes, one each; the tensors of all, in the order of the chunks.

    Chunk i has sizes[i] rows, and `work(i)` computes them.
    """
    chunk = step * count() + rank()
    part = work(min(chunk, len(sizes) - 1))  # a process without a chunk repeats the last one: all must take part
    if count() == 1:
        return part
    before = sum(sizes[step * count() : chunk])
    mine = slice(before, before + (sizes[chunk] if chunk < len(sizes) else 0))
    total = sum(sizes[step * count() : (step + 1) * count()])
    return {name: gather(rows[: mine.stop - mine.start], total, mine) for name, rows in part.items()}


def largest(value: float) -> float:
    """The largest of a number over the processes; NaN where any is NaN."""
    if count() == 1:
        return value
    values = torch.zeros(count(), dtype=torch.float32, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    values[rank()] = value
    dist.all_reduce(values)
    return values.max().item()


def any_of(flag: bool) -> bool:
    """Whether the flag is up in any process."""
    return largest(float(flag)) > 0


def total(value: Tensor) -> Tensor:
    """The sum of a tensor over the processes."""
    if count() > 1:
        dist.all_reduce(value := value.clone())
    return value


def add_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum the gradients of all processes, in place."""
    if count() > 1:
        for parameter in parameters:
            dist.all_reduce(parameter.grad)


def join(device: torch.device) -> None:
    """Join the processes that torchrun has started, if it has started this one."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)


def is_lost(error: Exception) -> bool:
    """Whether an error means that another process of the job is gone."""
    return count() > 1 and (isinstance(error, dist.DistError) or "peer" in str(error).lower())


def leave() -> None:
    """Leave the other processes without waiting for them."""
    if dist.is_initialized():
        dist.destroy_process_group()
