"""Random streams by name, large samples in chunks of bounded memory, and several processes.

Whatever draws at random gets a stream of its own, named by a word and its generation, so it gives
the same numbers whenever and wherever it is computed: after a resume, or in any process of a job.

One job may be spread over several processes: `torchrun --nproc-per-node N main.py ...`. Every
process runs the whole algorithm with the same streams. Each draws and scores its share of the rows
of a sample, the results are gathered, and then all learn the same; after each generation `align`
removes the differences that rounding has made between them. Process 0 writes the files, and a
single process does all of it alone. R runs, K particles, N rows.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from tsmc.sampler import Population, Sigma, Twist, tsmc

Draw = Callable[[int, torch.Generator], Any]  # (size, generator) -> an object of tensors
PATIENCE = timedelta(hours=2)  # how long a process waits for the others


def rank() -> int:
    """The number of this process; 0 in one that has not joined a job."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Number of processes."""
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


def first(value: Any) -> Any:
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
    """Give the tensors of these modules, of those that are modules, the values of process 0."""
    for module in modules:
        if count() > 1 and isinstance(module, torch.nn.Module):
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)


def progress(steps: Iterable | int, title: str, m: int | None = None) -> tqdm:
    """The steps with a bar on a terminal, in process 0 alone; a number stands for its range."""
    steps = range(steps) if isinstance(steps, int) else steps
    title = title if m is None else f"generation {m}, {title}"
    # None: tqdm shows nothing where standard error is no terminal.
    return tqdm(steps, desc=title, leave=False, disable=None if rank() == 0 else True)


class Streams:
    """Random streams, each named by a word and its generation m (None outside of them)."""

    def __init__(self, seed: int = 0, device: str | torch.device = "cpu", rows: int = 1000):
        """`rows` sequences are drawn at a time."""
        self.seed = seed
        self.device = torch.device(device)
        self.rows = rows

    def stream(self, *name: str | int | None) -> torch.Generator:
        """The random stream of a name, as ("sampling", 1); those of other names are independent."""
        # Hashed, so that streams of neighbouring seeds or names have nothing in common.
        digest = hashlib.sha256(repr((self.seed, *name)).encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))

    def draw(
        self, word: str, m: int | None, total: int, draw: Draw, particles: int = 1
    ) -> dict[str, Tensor]:
        """A sample of size `total`, of `particles` sequences each, in chunks with streams (word, m,
        number); the processes of a job share the chunks. ValueError for a sample of size 0."""
        if total < 1 or particles < 1:
            raise ValueError(f"{total} times {particles} texts cannot be drawn; give 1 or more")
        at_once = max(1, self.rows // particles)
        starts = range(0, total, at_once)
        parts: dict[int, dict[str, Tensor]] = {}
        for n in progress(range(rank(), len(starts), count()), word, m):
            drawn = vars(draw(min(at_once, total - starts[n]), self.stream(word, m, n)))
            parts[n] = {name: part.cpu() for name, part in drawn.items() if part is not None}
        for of_process in gather(parts):
            parts |= of_process
        chunks = [parts[n] for n in range(len(starts))]
        joined = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return {name: tensor.to(self.device) for name, tensor in joined.items()}


def draw_population(
    streams: Streams,
    word: str,
    m: int | None,
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    runs: int,
    **rule: Any,
) -> Population:
    """R = runs runs of K = particles, drawn in chunks with options of `tsmc`; ValueError where
    every run ended with weight zero."""

    def draw(size: int, generator: torch.Generator) -> Population:
        given = (sigma.model, twist, sigma.log_potential, particles, generator, size)
        return tsmc(*given, log_prefix=sigma.log_prefix, **rule)

    population = Population(**streams.draw(word, m, runs, draw, particles))
    if not population.is_alive().any():
        fault = f"all {runs} runs of {particles} particles ended with weight zero"
        raise ValueError(f"{fault}; use more particles, or soften the potential")
    return population
