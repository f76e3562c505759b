"""One step of two processes equals that of one: losses, gradients, weights; draws exactly.

No batch divides evenly, and texts end, so the shares of the two processes differ in size. Losses
add up; all the rest both processes have.
"""

import os
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
from jobs import CONTEXT, ended
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from worlds import Recorded, rare_potential, tiny_conditional

import distill.paper
from distill import DPO, GRPO, BaselineOptions, Paper, PaperOptions, Pooled, PooledOptions, Streams
from tinystories.errors import InputError
from tsmc import processes
from tsmc.runs import draw_population
from twist.pair import Pair
from twist.potential import seen_from

END = 6
SIZES = {"particles": 5, "distill_runs": 7, "ctl_batch_size": 7}
SIZES |= {"ctl_updates": 2, "distill_updates": 2}
POOL = {"pool_first_draws": 99, "pool_first_rounds": 2, "pool_first_updates": 2}
POOL |= {"pool_draws": 45, "pool_updates": 2, "pool_batch_size": 9}
TUNED = {"updates": 2, "batch_size": 7}


def observed(make, *options, step) -> dict:
    """Losses, gradients of each update and what a step of a learner has learned."""
    reports, gradients = Recorded(), []
    base = tiny_conditional(0, END)
    learner = make(base, rare_potential, *options, Streams(0, rows=20), reports)

    def keep_gradients(optimizer: torch.optim.Optimizer, *_) -> None:
        if not isinstance(optimizer, torch.optim.LBFGS):
            each = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients.append([parameter.grad.clone() for parameter in each])

    handle = register_optimizer_step_pre_hook(keep_gradients)
    learned = step(learner)
    handle.remove()
    losses = [row["loss"] for rows in reports.values() for row in rows if "loss" in row]
    return {
        "losses": torch.tensor(losses),
        "gradients": gradients,
        "weights": list(learned.state_dict().values()),
    }


def draws() -> dict:
    """Samples in chunks of 20, 20 and 5, and runs of the sampler in chunks of 4, 4 and 2."""
    streams, base = Streams(0, rows=20), tiny_conditional(0, END)
    uniform = streams.draw(
        "x", 1, 45, lambda size, source: {"u": torch.rand(size, generator=source)}
    )
    sigma = seen_from(base, base, rare_potential)
    runs = draw_population(streams, "y", 2, sigma, None, 5, 10)
    return {"losses": torch.zeros(0), "weights": [uniform["u"], *vars(runs).values()]}


def tools() -> dict:
    """Parameters that process 0 and none has used, rows in order, and a batch that is too small."""
    own = processes.own_rows(5)
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    if own.start == 0:
        used.sum().backward()
    processes.sum_gradients([unused, used])
    assert unused.grad is None
    rows = processes.gather_rows(torch.arange(5)[own])
    if processes.count() == 2:
        with pytest.raises(InputError, match=r"^2 processes cannot share a batch of 1; start"):
            processes.own_rows(1)
        assert processes.gather(own.stop) == [2, 5] and processes.first(own.stop) == 2
    return {"losses": torch.zeros(0), "weights": [used.grad, rows]}


def distilled(learner) -> nn.Module:
    """Line 3, with batches of 9."""
    with mock.patch.object(distill.paper, "BATCH_SIZE", 9):
        return learner.distil(Pair(learner.base, None), 1).network


def fitted(learner) -> nn.Module:
    """Lines 1 and 3 of the pooled learner."""
    return learner.distil(learner.first_twist(), 1).adapter


def contrasted(learner) -> nn.Module:
    """Line 4, where p^(1) is not p^(0)."""
    return learner.learn_twist(tiny_conditional(1, END), 1).twist


def tuned(learner) -> nn.Module:
    """Line 1 of a baseline."""
    return learner.first_twist().model.network


lora = {"student": "lora"}
STEPS = {
    "CTL": lambda: observed(Paper, PaperOptions(**SIZES), step=contrasted),
    "fine-tuning": lambda: observed(Paper, PaperOptions(**SIZES), step=distilled),
    "LoRA": lambda: observed(Paper, PaperOptions(**SIZES, **lora), step=distilled),
    "pooled": lambda: observed(Pooled, PooledOptions(**POOL), step=fitted),
    "dpo": lambda: observed(DPO, BaselineOptions(**TUNED), step=tuned),
    "grpo": lambda: observed(GRPO, BaselineOptions(**TUNED, **lora), step=tuned),
    "draws": draws,
    "tools": tools,
}


def child(name: str, rank: int, port: int, folder: Path) -> None:
    """One of two processes, as torchrun starts them."""
    place = {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()}
    processes.join(torch.device("cpu"))
    torch.save(STEPS[name](), folder / f"{rank}.pt")
    processes.leave()


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_two_processes_is_that_of_one(name, tmp_path):
    wanted = STEPS[name]()  # first, so that forked processes have all libraries
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    jobs = [CONTEXT.Process(target=child, args=(name, rank, port, tmp_path)) for rank in (0, 1)]
    for job in jobs:
        job.start()
    assert ended(*jobs) == [0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    exactly = {"rtol": 0, "atol": 0.0 if name in ("draws", "tools") else 1e-5}
    losses = found[0].pop("losses") + found[1].pop("losses")
    torch.testing.assert_close(losses, wanted.pop("losses"), **exactly)
    torch.testing.assert_close(found[0], wanted, **exactly)
    torch.testing.assert_close(found[1], wanted, **exactly)
