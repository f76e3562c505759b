"""Two processes equal one: losses, gradients and weights of a step.

Each process draws its share of the rows, and no batch divides evenly; texts end. All learn the
same.
"""

import pytest
import torch
from jobs import exit_codes
from torch.optim.optimizer import register_optimizer_step_pre_hook
from worlds import rare_potential, tiny_conditional

from distill import DPO, GRPO, BaselineOptions, Paper, PaperOptions, Pooled, PooledOptions, Streams
from tsmc import streams
from twist.pair import Pair

END = 6
STUDENT = tiny_conditional(1, END)
SIZES = {"particles": 5, "distill_runs": 7, "ctl_batch_size": 7}
PAPER = PaperOptions(**SIZES, ctl_updates=2, distill_updates=2, student="lora")
POOL = {"pool_first_draws": 99, "pool_first_rounds": 2, "pool_first_updates": 2}
POOLED = PooledOptions(**POOL, pool_draws=45, pool_updates=2, pool_batch_size=9)
TUNED = BaselineOptions(updates=2, batch_size=13)
STEPS = {  # a learner, its options, a step that returns a module, how many texts it scores
    "CTL": (Paper, PAPER, lambda one: one.learn_twist(STUDENT, 1).twist, 14),
    "LoRA": (Paper, PAPER, lambda one: one.distil(Pair(one.base, None), 1).network, 35),
    "pooled": (Pooled, POOLED, lambda one: one.distil(one.first_twist(), 1).adapter, 144),
    "dpo": (DPO, TUNED, lambda one: one.first_twist().model.network, 26),
    "grpo": (GRPO, TUNED, lambda one: one.first_twist().model.network, 26),
}


def step_of(name: str) -> tuple[int, list]:
    """How many texts this process has scored; losses, gradients, and what has been learned."""
    kind, options, step, _ = STEPS[name]
    gradients, scored = [], []

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        scored.append(len(tokens))
        return rare_potential(tokens)

    def keep_gradients(optimizer: torch.optim.Optimizer, *_) -> None:
        if not isinstance(optimizer, torch.optim.LBFGS):
            for group in optimizer.param_groups:
                gradients.extend(parameter.grad.clone() for parameter in group["params"])

    learner = kind(tiny_conditional(0, END), log_phi, options, Streams(0, rows=20))
    handle = register_optimizer_step_pre_hook(keep_gradients)
    learned = step(learner)
    handle.remove()
    if streams.count() == 2:
        with pytest.raises(ValueError, match=r"^2 processes cannot share a batch of 1; start"):
            streams.own_rows(1)
        for tensor in learned.state_dict().values():
            tensor.add_(streams.rank())
        streams.align([learned, None])  # the tensors are those of process 0 again
    losses = [record["loss"] for record in learner.records if "loss" in record]
    return sum(scored), [torch.tensor(losses), gradients, list(learned.state_dict().values())]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_two_processes_is_that_of_one(name, tmp_path):
    scored, wanted = step_of(name)  # first, so that forked processes have all libraries
    assert scored == STEPS[name][-1]

    def save() -> None:
        streams.join(torch.device("cpu"))
        torch.save(step_of(name), tmp_path / f"{streams.rank()}.pt")
        streams.leave()

    assert exit_codes(2, save) == [0, 0]
    (some, first), (others, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert some + others == scored and min(some, others) > 0.25 * scored
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(second, wanted, rtol=0, atol=1e-5)
