"""The whole main job beside what its matrix products take at least: `python -m eval.bench --main`.

`main.py` runs as it is, on the pocket preset, in this process: once to be timed and once more to be counted, because counting
delays every operation. A phase lasts until the next one begins, so that scoring and saving belong to what they follow; before
the first one the networks are loaded. Products are counted as they are computed, those of both passes of training among them;
the limit of a phase is their number over this machine's rate (`roofline.py`).
"""

import contextlib
import dataclasses
import itertools
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eval.bench.roofline import probes, rates_of
from eval.run.plan import seconds_of
from eval.run.steps import Progress
from eval.run.table import align
from eval.scorers.encoder import Runner
from tinystories.interrupts import MAIN


@dataclasses.dataclass
class Mark:
    """Where the job stood when a phase began."""

    phase: str
    seconds: float
    flops: float
    texts: int  # that had been scored or embedded


def linear_flops(x: tuple[int, ...], weight: tuple[int, ...], *_, out_shape: tuple[int, ...], **__) -> int:
    """Of oneDNN's x W^T, from shapes."""
    return 2 * x[-1] * torch.Size(out_shape).numel()


def counter() -> FlopCounterMode:
    """Counts the operations of the products that are computed while it is open, oneDNN's among them."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.mkldnn._linear_pointwise: linear_flops})


@contextlib.contextmanager
def marked(marks: list[Mark], flops: Callable[[], int]) -> Iterator[None]:
    """While this is open, add a mark for the beginning, for every phase of a run, and for the end; flops() counts so far."""
    texts, begin, score = 0, Progress.__init__, Runner.__call__

    def mark(phase: str) -> None:
        marks.append(Mark(phase, time.perf_counter(), float(flops()), texts))

    def begun(progress: Progress, *args) -> None:
        """`Progress.__init__`, and a mark."""
        begin(progress, *args)
        mark(progress.phase)

    def scored(runner: Runner, given: list[str]) -> Tensor:
        """`Runner.__call__`, its texts counted."""
        nonlocal texts
        texts += len(given)
        return score(runner, given)

    with mock.patch.object(Progress, "__init__", begun), mock.patch.object(Runner, "__call__", scored):
        mark("loading")
        yield
        mark("")


def product_rate() -> float:
    """Operations a second of this machine, now."""
    cpu = torch.device("cpu")
    return rates_of(seconds_of(probes(cpu, torch.float32), 1, cpu)).flops


def budget(marks: list[Mark], rate: float) -> list[list[str]]:
    """A line for each kind of phase, all generations and rounds together, and their sum."""
    kinds: dict[str, list[float]] = {}
    for one, other in itertools.pairwise(marks):
        spent = other.seconds - one.seconds, other.flops - one.flops, other.texts - one.texts
        sums = kinds.setdefault(one.phase.rstrip(" 0123456789"), [0.0, 0.0, 0])
        sums[:] = (total + part for total, part in zip(sums, spent, strict=True))
    kinds["together"] = [sum(column) for column in zip(*kinds.values(), strict=True)]
    lines = [["phase", "seconds", "texts scored", "GFLOP", "limit", "over limit"]]
    for kind, (seconds, flops, texts) in kinds.items():
        limit = flops / rate
        over = f"{seconds / limit:.2f}" if limit > 0.01 * seconds else ""
        lines.append([kind, f"{seconds:.1f}", f"{texts}", f"{flops / 1e9:.0f}", f"{limit:.1f}", over])
    return lines


def run_main(generations: int, flops: Callable[[], int]) -> list[Mark]:
    """The marks of one run of the main job."""
    marks: list[Mark] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["main.py", "--generations", str(generations), "--out", str(Path(folder) / "run")]
        with mock.patch.object(sys, "argv", arguments), marked(marks, flops):
            runpy.run_path(str(MAIN), run_name="__main__")
    return marks


def bench_main(quick: bool) -> None:
    """Run the main job twice, of two generations unless it is to be quick, and print its budget."""
    generations = 0 if quick else 2
    rates = [product_rate()]
    timed = run_main(generations, lambda: 0)
    rates.append(product_rate())
    with counter() as operations:
        counted = run_main(generations, operations.get_total_flops)
    marks = [dataclasses.replace(mark, seconds=other.seconds) for mark, other in zip(counted, timed, strict=True)]
    print(f"\nThe main job, {torch.get_num_threads()} threads, products at {max(rates) / 1e9:.0f} GFLOP/s")
    print(align(budget(marks, max(rates))))
