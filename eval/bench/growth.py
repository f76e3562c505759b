"""How time and memory grow with the work: `python -m eval.bench --growth docs/growth.png`, and the memory of a bench's pieces.

Every point is measured in a process of its own, because the peak of memory of a process never falls. TSMC resamples at every
step here, so that keys and values move with the ancestors; its potential costs nothing.
"""

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eval.bench.contestants import load_sampler, load_scorers, make_texts
from eval.run.plan import peak_memory, process_memory
from eval.run.table import align
from eval.scorers import toxicity
from tinystories import Conditional, InputError
from tinystories.checkpoint import replacing
from tinystories.fast import keep_freed_memory
from tsmc import Chunks, Sigma, rejection_sample, sample_runs, tsmc

LENGTH, ROWS = 20, 1000  # T, and sequences drawn at a time
LEAST_SECONDS = 2.0  # that a point is repeated for


@dataclass(frozen=True)
class Point:
    """R runs of K particles with T tokens."""

    particles: int
    length: int = LENGTH
    runs: int = 1


AXES = {
    "pocket": {
        "particles": [Point(count) for count in (50, 100, 1000, 10_000, 100_000)],
        "length": [Point(1000, length) for length in (20, 40, 60, 80, 100, 120)],  # of the model's 128 positions
        "runs": [Point(50, runs=count) for count in (1, 20, 200, 2000)],
    },
    "paper": {
        "particles": [Point(count) for count in (50, 100, 1000, 10_000)],
        "length": [Point(100, length) for length in (20, 50, 100, 150, 200)],
        "runs": [Point(50, runs=count) for count in (1, 20, 100)],
    },
}
TITLES = {"particles": "particles K", "length": "tokens T", "runs": "runs R"}


def free_potential(tokens: Tensor, log_p: Tensor) -> Tensor:
    """A log phi [N] that costs nothing to compute."""
    return -tokens.float().mean(-1) / 1e5


def zero_potential(tokens: Tensor) -> Tensor:
    """log phi = 0 [N], with which rejection accepts everything."""
    return torch.zeros(len(tokens))


def pieces(size: str, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[int], object]]:
    """Pieces of a run whose memory counts, each called with how many sequences or texts it is given."""
    sampler, scorers = load_sampler(size, dtype, device), load_scorers(size, dtype, device)
    model, generator = Conditional(sampler.lm, sampler.prompt, LENGTH), torch.Generator(device).manual_seed(0)
    texts = make_texts(scorers, mixed=True)

    def score(count: int) -> None:
        scorer = scorers["classifier"]
        toxicity.ToxicityScorer(scorer.network, scorer.tokenizer)((texts * count)[:count])

    return {
        "TSMC": lambda count: tsmc(model, sampler.twist, free_potential, count, generator),
        "rejection": lambda count: rejection_sample(
            model, zero_potential, Chunks(count, ROWS, lambda chunk: generator)
        ),
        "scoring": score,
    }


def peak_of(
    size: str, dtype: torch.dtype, device: torch.device, piece: str, count: int
) -> tuple[int | None, int | None]:
    """Bytes with all networks loaded and at the peak of one piece, None where the system does not tell; in a fresh process."""
    keep_freed_memory()
    work = pieces(size, dtype, device)[piece]
    before = peak_memory(device)
    work(count)
    return before, peak_memory(device)


def cost_of(size: str, point: Point, threads: int) -> tuple[float, int]:
    """Seconds of one point, the median of some, and the bytes that it took on top of the networks; in a fresh process."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    sampler = load_sampler(size, torch.float32, torch.device("cpu"))
    sigma = Sigma(Conditional(sampler.lm, sampler.prompt, point.length), free_potential)

    def sample(particles: int, runs: int) -> float:
        began = time.perf_counter()
        chunks = Chunks(runs, ROWS // particles, lambda chunk: torch.Generator().manual_seed(chunk))
        sample_runs(sigma, sampler.twist, particles, chunks)
        return time.perf_counter() - began

    before = process_memory("VmRSS")
    sample(1, 1)  # which makes everything ready
    seconds: list[float] = []
    while sum(seconds) < LEAST_SECONDS:
        seconds.append(sample(point.particles, point.runs))
    return statistics.median(seconds), process_memory("VmHWM") - before


def send(pipe, function: Callable, *args) -> None:
    """What a fresh process does."""
    pipe.send(function(*args))


def in_fresh_process(function: Callable, *args) -> tuple:
    """What a function returns in a process of its own, which does not inherit this one's peak."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(sender, function, *args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise InputError(f"the process of {args} has ended early, for want of memory perhaps; see above") from None
    finally:
        process.join()


def growth_table(axis: str, points: list[Point], costs: list[tuple[float, int]]) -> str:
    """Seconds and memory of every point, for each sequence too, and how seconds have grown since the point before.

    The last column is the exponent: 1 where they grow as the axis does, 2 with its square.
    """
    lines = [[TITLES[axis], "seconds", "us a token", "MiB", "KiB a sequence", "exponent"]]
    for i, (point, (seconds, memory)) in enumerate(zip(points, costs, strict=True)):
        size, sequences = getattr(point, axis), point.particles * point.runs
        cells = [f"{size:,}", f"{seconds:.3f}", f"{1e6 * seconds / sequences / point.length:.2f}"]
        cells += [f"{memory / 2**20:,.0f}", f"{memory / 2**10 / sequences:,.0f}"]
        ratio = size / getattr(points[i - 1], axis)
        lines.append([*cells, f"{math.log(seconds / costs[i - 1][0]) / math.log(ratio):.2f}" if i else ""])
    return align(lines)


def draw(costs: dict[str, list[tuple[float, int]]], size: str, path: Path) -> None:
    """Seconds and memory against each axis, logarithmic, beside a line of slope 1."""
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(2, len(costs), figsize=(9, 5.2), sharex="col", layout="constrained")
    for column, (axis, values) in enumerate(costs.items()):
        x = [getattr(point, axis) for point in AXES[size][axis]]
        for row, (title, y) in enumerate(zip(("seconds", "memory, MiB"), zip(*values, strict=True), strict=True)):
            y, axes = [value / (2**20 if row else 1) for value in y], rows[row][column]
            axes.loglog(x, y, "o-", ms=4)
            axes.loglog(x, [y[-1] * value / x[-1] for value in x], "k:", lw=0.8)
            axes.set(ylabel=title if column == 0 else "", xlabel=TITLES[axis] if row else "")
            axes.grid(alpha=0.3)
            if axis == "length":  # less than a power of ten from end to end
                axes.set_xticks(x, map(str, x), fontsize=7)
                axes.xaxis.set_minor_locator(plt.NullLocator())
    figure.suptitle("TSMC, each point in a process of its own; dotted: in proportion", fontsize=10)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def bench_growth(size: str, path: Path) -> None:
    """Measure all points of one size, print a table for each axis, and draw them; InputError off Linux."""
    if process_memory("VmRSS") is None:
        raise InputError("--growth needs the memory that Linux tells of a process; run it there")
    costs: dict[str, list[tuple[float, int]]] = {}
    for axis, points in AXES[size].items():
        costs[axis] = []
        for point in points:
            costs[axis].append(in_fresh_process(cost_of, size, point, torch.get_num_threads()))
            print(f"measured {size}: {point}", file=sys.stderr, flush=True)
    print(
        f"\n{size}, TSMC, float32, {torch.get_num_threads()} threads; {ROWS} sequences at a time if there are several runs"
    )
    for axis, points in AXES[size].items():
        first = points[0]
        others = [f"{TITLES[name]} = {getattr(first, name)}" for name in TITLES if name != axis]
        print(f"\n{', '.join(others)}\n{growth_table(axis, points, costs[axis])}")
    draw(costs, size, path)
    print(f"\nwrote {path}")
