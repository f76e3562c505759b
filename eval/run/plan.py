"""How much work a run is, phase by phase, and before a long run how many seconds and bytes that takes on this machine.

The work of a phase is its sequences times what one costs. For the pocket preset drawing and scoring one counts 1, and only
the shares of the phases in the whole matter. At the paper's size each kind of work is timed once: fits at their real batch
size, drawing with some hundred sequences at a time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

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


def seconds_each(work: Callable[[], object], sequences: int) -> float:
    """Seconds for each of the sequences that `work` treats; its first call, which makes things ready, does not count."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1] / sequences


def measured_costs(config: RunConfig, setup: Setup) -> Costs:
    """Seconds of one sequence on this machine; nothing of the run is changed, and none of its random numbers are drawn."""
    device, sizes = setup.problems[0].base.prompt.device, setup.model.config
    generator, sigma = torch.Generator(device).manual_seed(0), setup.sigmas()[0]
    count, pool, ctl, distill = drawn_at_once(config), config.pool, config.ctl, config.distill
    if config.method == "pooled":
        psi = EmbeddingTwist(pool.hidden_units, setup.model.output_weight, generator)
    else:
        psi = TwistMLP(sizes.hidden_size, ctl.hidden_units, sizes.vocab_size, generator)
    accelerate(psi)
    drawn: list[torch.Tensor] = []

    def draw() -> None:
        tokens, _ = draw_round(sigma, psi, 1.0, Chunks(count, count, lambda chunk: generator))
        drawn[:] = [tokens]

    costs = {"drawn": seconds_each(draw, count)}
    optimizer = torch.optim.Adam([p for p in psi.parameters() if p.requires_grad], lr=0.0)
    if config.method == "pooled":
        every = Pool()
        every.add(drawn[0], torch.zeros(count, dtype=torch.float64, device=device))
        batches = batches_from_pools([sigma.model], [every], 0.0, 1, pool.batch_size, generator)
        costs["pooled"] = seconds_each(
            lambda: learn_twist_from_pools(psi, optimizer, batches, Steps(1)), pool.batch_size
        )
        return Costs(**costs)
    alive = Sigma(sigma.model, lambda tokens, log_p: sigma.log_potential(tokens, log_p).clamp(min=-1.0))
    batches = batches_from_proposal([alive], psi, ctl.batch_size, generator)
    costs["contrastive"] = seconds_each(lambda: learn_twist(psi, optimizer, batches, Steps(1)), ctl.batch_size)
    if config.generations > 0:
        student = Student(setup.model, 0.0, 0.0, config.lora, generator)
        samples = batches_of([drawn[0]], distill.batch_size, generator)
        costs["distilled"] = seconds_each(
            lambda: self_distill(student, [sigma.model], samples, Steps(1)), distill.batch_size
        )
    return Costs(**costs)


def memory_needed(config: RunConfig, setup: Setup) -> float | None:
    """About how many bytes a run needs, after `measured_costs` in the same process; None where the system does not tell.

    The peak so far, what more sequences at a time keep in their caches, and the hidden states that the pooled fit reads, twice
    while they are put together.
    """
    device, weight, pool = setup.problems[0].base.prompt.device, setup.model.wte.weight, config.pool
    status = Path("/proc/self/status")
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        lines = status.read_text().splitlines() if status.exists() else []
        peak = next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
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
