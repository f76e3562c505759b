"""How much work a run is, phase by phase, and before a long run how many seconds and bytes that takes on this machine.

The work of a phase is its sequences times what one costs. For the pocket preset drawing and scoring one counts 1, and only
the shares of the phases in the whole matter. At the paper's size each kind of work is timed once: fits at their real batch
size, drawing with some hundred sequences at a time.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distill import Student, batches_of, self_distill
from eval.run.options import RunConfig
from eval.run.setup import Setup, bytes_of_sequence
from tinystories.fast import accelerate
from tsmc import Chunks, Sigma, Steps
from twist import (
    EmbeddingTwist,
    Pool,
    TwistMLP,
    batches_from_pools,
    batches_from_proposal,
    draw_round,
    learn_twist,
    learn_twist_from_pools,
)

DRAWN_AT_ONCE = 200  # sequences of a measurement; more at a time hardly lower the cost of each


@dataclass(frozen=True)
class Costs:
    """What one sequence costs: drawn and scored, and in a step of each kind of fit; as measured on the pocket preset."""

    drawn: float = 1.0
    pooled: float = 0.6
    contrastive: float = 1.7  # which draws and scores it too
    distilled: float = 1.5


def planned_work(config: RunConfig, have_target: list[bool], costs: Costs) -> list[float]:
    """The work of every phase of a run in turn. `have_target` says which prompts have exact samples."""
    pool, ctl, distill, last = config.pool, config.ctl, config.distill, config.generations
    bare, of_particle = costs.drawn * config.eval.base_samples, costs.drawn * (1 + config.moves)
    proposals, prompts, plan = costs.drawn * config.eval.target_proposals, len(have_target), []
    for has_target in have_target:
        plan += [bare] if has_target or not proposals else [proposals, bare]
    for m in range(last + 1):
        if config.method == "pooled":
            for number in range(0 if m == 0 else 1, pool.rounds + 1):
                plan += [costs.drawn * (pool.draws if m or number else pool.base_draws)] * prompts
                plan += [costs.pooled * pool.updates * pool.batch_size]
        else:
            if m > 0:
                plan += [of_particle * config.particles * distill.runs] * prompts
                plan += [costs.distilled * distill.updates * distill.batch_size]
            plan += [costs.contrastive * ctl.updates * ctl.batch_size]
        evaluation = [of_particle * config.eval.particles * config.eval.runs]
        plan += (evaluation + [bare] * (config.method == "distilled" and m > 0)) * prompts
    return plan


def drawn_at_once(config: RunConfig) -> int:
    """How many sequences are drawn to measure what one costs."""
    return min(config.rows, DRAWN_AT_ONCE)


def seconds_of(ways: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each way, all run in turn, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def seconds_each(work: Callable[[], object], sequences: int, device: torch.device) -> float:
    """Seconds for each of the sequences that `work` treats; its first call, which makes things ready, does not count."""
    return seconds_of({"work": work}, 1, device)["work"] / sequences


def measured_costs(config: RunConfig, setup: Setup) -> Costs:
    """Seconds of one sequence on this machine; nothing of the run is changed, and none of its random numbers are drawn."""
    sigma, count = setup.sigmas()[0], drawn_at_once(config)
    generator = torch.Generator(sigma.model.prompt.device).manual_seed(0)
    width, vocabulary = setup.model.config.hidden_size, setup.model.config.vocab_size
    if config.method == "pooled":
        psi = accelerate(EmbeddingTwist(config.pool.hidden_units, setup.model.output_weight, generator))
    else:
        psi = accelerate(TwistMLP(width, config.ctl.hidden_units, vocabulary, generator))
    drawn: list[Tensor] = []

    def draw() -> None:
        drawn.append(draw_round(sigma, psi, 1.0, Chunks(count, count, lambda chunk: generator))[0])

    seconds = seconds_each(draw, count, sigma.model.prompt.device)
    fits = pooled_costs if config.method == "pooled" else algorithm_1_costs
    return Costs(seconds, **fits(config, setup, psi, drawn[0], generator))


def pooled_costs(
    config: RunConfig, setup: Setup, psi: EmbeddingTwist, tokens: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """Seconds of one sequence in a step of the pooled fit, on sequences tokens [N, T]."""
    pool, size = Pool(), config.pool.batch_size
    pool.add(tokens, torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device))
    batches = batches_from_pools([setup.problems[0].base], [pool], 0.0, 1, size, generator)
    optimizer = torch.optim.Adam(psi.shift.parameters(), lr=0.0)
    return {
        "pooled": seconds_each(lambda: learn_twist_from_pools(psi, optimizer, batches, Steps(1)), size, tokens.device)
    }


def algorithm_1_costs(
    config: RunConfig, setup: Setup, psi: TwistMLP, tokens: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """Seconds of one sequence in a step of CTL, and of distilling sequences tokens [N, T] where the run does that."""
    sigma, size = setup.sigmas()[0], config.ctl.batch_size
    alive = Sigma(sigma.model, lambda rows, log_p: sigma.log_potential(rows, log_p).clamp(min=-1.0))
    batches = batches_from_proposal([alive], psi, size, generator)
    optimizer = torch.optim.Adam(psi.parameters(), lr=0.0)
    costs = {"contrastive": seconds_each(lambda: learn_twist(psi, optimizer, batches, Steps(1)), size, tokens.device)}
    if config.generations > 0:
        size = config.distill.batch_size
        student = Student(setup.model, 0.0, 0.0, config.lora, generator)
        samples = batches_of([tokens], size, generator)
        costs["distilled"] = seconds_each(
            lambda: self_distill(student, [sigma.model], samples, Steps(1)), size, tokens.device
        )
    return costs


def process_memory(field: str) -> int | None:
    """Bytes of memory that Linux says this process holds (VmRSS) or has held at most (VmHWM); None on other systems."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), None)


def peak_memory(device: torch.device) -> int | None:
    """Bytes that this process has held at most on the device it works on; None where the system does not tell."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_memory("VmHWM")


def memory_needed(config: RunConfig, setup: Setup) -> float | None:
    """About how many bytes a run needs, after `measured_costs` in the same process; None where the system does not tell.

    The peak so far, what more sequences at a time keep in their caches, and the hidden states that the pooled fit reads, twice
    while they are put together.
    """
    weight, pool = setup.model.wte.weight, config.pool
    peak = peak_memory(weight.device)
    if peak is None:
        return None
    at_once = max(config.rows, config.eval.particles, config.particles if config.method == "distilled" else 0)
    peak += (at_once - drawn_at_once(config)) * bytes_of_sequence(config, setup.model)
    if config.method == "distilled":
        return peak
    drawn = pool.base_draws + (config.generations + 1) * pool.rounds * pool.draws
    states = min(drawn, pool.updates * pool.batch_size) * config.length * setup.model.config.hidden_size
    return peak + 2 * weight.element_size() * states * len(setup.problems)


def estimate(plan: list[float], memory: float | None, processes: int) -> str:
    """A line about what a run will take, from the seconds of its phases and the bytes of one process."""
    seconds = sum(plan) / processes
    time_needed = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    if seconds > 6000:
        time_needed = f"{seconds / 3600:.1f} h"
    each = " in each process" if processes > 1 else ""
    bytes_needed = f", about {memory / 1e9:.1f} GB of memory{each}" if memory else ""
    return f"about {time_needed} in all{bytes_needed} (from a few measured steps)"
