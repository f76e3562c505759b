"""One step of two processes equals that of one: losses, gradients, weights; draws exactly.

No batch divides evenly, and texts end, so the shares of the two processes differ in size. Losses
add up; all the rest both processes have.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import exit_codes
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from worlds import Recorded, rare_potential, tiny_conditional

import distill.dpo
import distill.grpo
import distill.paper
from distill import DPO, GRPO, BaselineOptions, Paper, PaperOptions, Pooled, PooledOptions, Streams
from tinystories.errors import InputError
from tsmc import processes
from tsmc.runs import draw_population
from twist.pair import Pair
from twist.potential import seen_from

END = 6
STUDENT = tiny_conditional(1, END)
SIZES = {"particles": 5, "distill_runs": 7, "ctl_batch_size": 7}
SIZES |= {"ctl_updates": 2, "distill_updates": 2}
POOL = {"pool_first_draws": 99, "pool_first_rounds": 2, "pool_first_updates": 2}
POOL |= {"pool_draws": 45, "pool_updates": 2, "pool_batch_size": 9}
TUNED = {"updates": 2, "batch_size": 13}


def observed(make, options, step) -> tuple[torch.Tensor, list, list]:
    """Losses, gradients of each update and what a step of a learner has learned."""
    reports, gradients = Recorded(), []
    learner = make(tiny_conditional(0, END), rare_potential, options, Streams(0, rows=20), reports)

    def keep_gradients(optimizer: torch.optim.Optimizer, *_) -> None:
        if not isinstance(optimizer, torch.optim.LBFGS):
            each = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients.append([parameter.grad.clone() for parameter in each])

    handle = register_optimizer_step_pre_hook(keep_gradients)
    learned = step(learner)
    handle.remove()
    losses = [row["loss"] for rows in reports.values() for row in rows if "loss" in row]
    return torch.tensor(losses), gradients, list(learned.state_dict().values())


def draws() -> list[torch.Tensor]:
    """Samples in chunks of 20, 20 and 5, and runs of the sampler in chunks of 4, 4 and 2."""
    streams, base = Streams(0, rows=20), tiny_conditional(0, END)
    draw = lambda size, source: {"u": torch.rand(size, generator=source)}  # noqa: E731
    sigma = seen_from(base, base, rare_potential)
    runs = draw_population(streams, "y", 2, sigma, None, 5, 10)
    return [streams.draw("x", 1, 45, draw)["u"], *vars(runs).values()]


def tools() -> list[torch.Tensor]:
    """Parameters that process 0 and none has used, rows in order, and a batch that is too small."""
    own = processes.own_rows(5)
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    if own.start == 0:
        used.sum().backward()
    processes.sum_gradients([unused, used])
    assert unused.grad is None
    if processes.count() == 2:
        with pytest.raises(InputError, match=r"^2 processes cannot share a batch of 1; start"):
            processes.own_rows(1)
        assert processes.gather(own.stop) == [2, 5] and processes.first(own.stop) == 2
    return [used.grad, processes.gather_rows(torch.arange(5)[own])]


def tuned(learner) -> nn.Module:
    """Line 1 of a baseline."""
    return learner.first_twist().model.network


def distilled(learner) -> nn.Module:
    """Line 3 of the paper."""
    return learner.distil(Pair(learner.base, None), 1).network


STEPS = {
    "CTL": (Paper, PaperOptions(**SIZES), lambda one: one.learn_twist(STUDENT, 1).twist),
    "fine-tuning": (Paper, PaperOptions(**SIZES), distilled),
    "LoRA": (Paper, PaperOptions(**SIZES, student="lora"), distilled),
    "pooled": (Pooled, PooledOptions(**POOL), lambda one: one.distil(one.first_twist(), 1).adapter),
    "dpo": (DPO, BaselineOptions(**TUNED), tuned),
    "grpo": (GRPO, BaselineOptions(**TUNED, student="lora"), tuned),
}


def in_two(folder: Path, function: Callable, *arguments: object) -> list:
    """What a function returns in each of two processes."""

    def save() -> None:
        processes.join(torch.device("cpu"))
        torch.save(function(*arguments), folder / f"{processes.rank()}.pt")
        processes.leave()

    assert exit_codes(2, save) == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_two_processes_is_that_of_one(name, tmp_path, monkeypatch):
    monkeypatch.setattr(distill.paper, "BATCH_SIZE", 9)
    losses, *wanted = observed(*STEPS[name])  # first, so that forked processes have all libraries
    monkeypatch.setattr(distill.dpo, "ROWS", 4)  # pairs by twos
    monkeypatch.setattr(distill.grpo, "ROWS", 2)
    (some, *first), (others, *second) = in_two(tmp_path, observed, *STEPS[name])
    torch.testing.assert_close([some + others, *first], [losses, *wanted], rtol=0, atol=1e-5)
    torch.testing.assert_close(second, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", [draws, tools])
def test_two_processes_share_draws_and_rows_exactly(function, tmp_path):
    wanted = function()
    for found in in_two(tmp_path, function):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
