"""Random streams by name, and large samples in chunks of bounded memory, drawn by all processes.

Whatever draws at random has a stream of its own, with the same numbers after a resume or in any
process of `torchrun`: each draws a share, and all get the whole.
"""

import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

CHUNK = 250  # sequences that are drawn at a time, by each thread; on a GPU twice as many


def join_processes(device: torch.device) -> None:
    """Join the processes that torchrun has started, if any."""
    if (count := os.environ.get("WORLD_SIZE", "1")) != "1" and not dist.is_initialized():
        print(f"waiting for the {count} processes of WORLD_SIZE", file=sys.stderr)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def process() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def joined(parts: list[Any], device: torch.device) -> Any:
    """Objects of tensors as one on a device, their rows behind each other."""
    names = [name for name, value in vars(parts[0]).items() if value is not None]
    columns = {name: torch.cat([getattr(one, name).to(device) for one in parts]) for name in names}
    return type(parts[0])(**columns)


@functools.cache
def workers() -> ThreadPoolExecutor:
    """Two threads, each with half of the cores; the child of a fork, which has none, makes two."""
    os.register_at_fork(after_in_child=workers.cache_clear)
    half = torch.get_num_threads() // 2
    return ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(half,))


def num_workers(device: torch.device) -> int:
    """How many threads work side by side: two on a CPU of two cores, but none beside another."""
    is_main = threading.current_thread() is threading.main_thread()
    return 2 if is_main and device.type == "cpu" and torch.get_num_threads() > 1 else 1


def side_by_side(function: Callable, items: Iterable, device: torch.device) -> Iterator[Any]:
    """function(item) of all items, on a CPU by two threads, each with half of the cores: they wait
    for each other less than the threads inside of an operator do. Gradients are on."""
    return (workers().map if num_workers(device) > 1 else map)(function, items)


def gathered(value: Any) -> list[Any]:
    """The values of all processes, in their order."""
    values = [value] * process()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def progress(steps: Iterable, title: str, m: int | None = None, count: Any = None) -> tqdm:
    """The steps with a bar on a terminal."""
    title = title if m is None else f"generation {m}, {title}"
    return tqdm(steps, title, count, leave=False, disable=None)


class Streams:
    """Random streams, each named by a word and its generation m (None outside of them)."""

    def __init__(self, seed: int = 0, device: str | torch.device = "cpu"):
        self.seed = seed
        self.device = torch.device(device)

    def stream(self, *name: str | int | None) -> torch.Generator:
        """The random stream of a name, as ("sampling", 1), hashed to be independent of others."""
        digest = hashlib.sha256(repr((self.seed, *name)).encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))

    def draw(
        self, word: str, m: int | None, total: int, draw: Callable[..., Any], particles: int = 1
    ) -> Any:
        """`total` samples, each of `particles` sequences, by draw(size, generator) of a chunk."""
        at_once = max(1, (2 if self.device.type == "cuda" else 1) * CHUNK // particles)
        starts = range(0, total, at_once)
        rank, count = process()
        mine = range(rank, len(starts), count)  # the chunks of this process
        one = lambda n: draw(min(at_once, total - starts[n]), self.stream(word, m, n))  # noqa: E731
        chunks = list(progress(side_by_side(one, mine, self.device), word, m, len(mine)))
        if count > 1:  # tensors that travel are on the CPU
            chunks = [joined([chunk], torch.device("cpu")) for chunk in chunks]
        parts = gathered(chunks)
        return joined([parts[n % count][n // count] for n in range(len(starts))], self.device)
