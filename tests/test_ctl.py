"""Contrastive twist learning against the enumerated gradient, and what it achieves."""

from unittest import mock

import pytest
import torch
from worlds import generator, hard_potential, learn, table_world

import distill.paper
from tinystories.errors import InputError
from tsmc.exact import TableModel, TableTwist, Target
from twist.ctl import ctl_loss, draw_batch
from twist.potential import seen_from


def estimated_gradient(sigma, twist, batch_size, source) -> torch.Tensor:
    """The CTL gradient of one batch, shaped like the table of the twist."""
    loss = ctl_loss(twist, draw_batch(sigma, twist, batch_size, source))
    return torch.autograd.grad(loss, twist.log_psi)[0]


def exact_gradient(sigma, twist) -> torch.Tensor:
    """The enumerated CTL gradient."""
    target = Target(sigma.model, sigma.log_potential)
    return torch.autograd.grad(target.ctl_loss(twist), twist.log_psi)[0]


def world_of_generation(m: int):
    """p^(0), p^(m), a twist, and the potential phi, of generation 0 or 1."""
    base, twist, potential = table_world(3, 3, seed=1, scale=0.8)
    model = base if m == 0 else TableModel.random(3, 3, generator(9))
    return base, model, twist, potential


@pytest.mark.parametrize("m", [0, 1])
def test_mean_gradient_of_many_batches_is_the_enumerated_one(m):
    """Batches of 4000 leave a bias of self-normalised weights far below the standard error."""
    base, model, twist, potential = world_of_generation(m)
    sigma, source = seen_from(model, base, potential), generator(2)
    gradients = torch.stack([estimated_gradient(sigma, twist, 4000, source) for _ in range(100)])
    error = gradients.std(0) / 100**0.5
    z = (gradients.mean(0) - exact_gradient(sigma, twist)) / error
    assert z.abs().max() < 4.5  # 39 components
    assert 0.4 < z.square().mean() < 1.9
    assert (gradients.mean(0) / error).abs().max() > 20  # they can tell the gradient from none


def test_gradient_vanishes_at_the_optimal_twist():
    """All weights of a batch are equal there, so positives and negatives cancel one by one."""
    model, _, potential = table_world(3, 3, seed=5)
    sigma = seen_from(model, model, potential)
    optimal = TableTwist(Target(model, potential).optimal_log_psi())
    assert exact_gradient(sigma, optimal).abs().max() < 1e-12
    assert estimated_gradient(sigma, optimal, 64, generator(0)).abs().max() < 1e-12


@pytest.mark.parametrize("m", [0, 1])
def test_learning_brings_the_proposal_to_sigma(m):
    """Exact KL(sigma || q) falls under 2 % of where it starts, psi = 1."""
    base, model, _, potential = world_of_generation(m)
    target = Target(model, seen_from(model, base, potential).log_potential)
    twist = TableTwist.ones(model)

    def divergence() -> float:
        return target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())

    before = divergence()
    reports = learn(twist, model, potential, 300, 500, learning_rate=0.05, base=base)
    assert before > 0.05 and divergence() < 0.02 * before
    assert len(reports) == 300 and all(1 <= figures["ess"] <= 500.001 for figures in reports)
    assert reports[-1]["ess"] > 1.1 * reports[0]["ess"], "a better proposal has more even weights"


def test_the_step_size_falls_linearly_to_a_tenth():
    """A step of Adam is its step size where every gradient is one."""
    model, twist, potential = table_world(2, 2)
    before = twist.log_psi.detach().clone()
    with mock.patch.object(distill.paper, "ctl_loss", lambda twist, batch: twist.log_psi.sum()):
        learn(twist, model, potential, 5, 10, learning_rate=0.1)
    wanted = torch.full_like(before, 0.1 * (1 + 0.82 + 0.64 + 0.46 + 0.28))
    torch.testing.assert_close(before - twist.log_psi, wanted)


@pytest.mark.parametrize("psi", [3000.0, torch.nan])
def test_an_exploded_twist_stops_before_the_step(psi):
    model, twist, potential = table_world(3, 3, seed=3)
    twist.log_psi.data[..., 0] += psi
    before = twist.log_psi.detach().clone()
    words = r"^twist learning of generation 1: psi has exploded .*; lower --ctl-learning-rate"
    with pytest.raises(InputError, match=words):
        learn(twist, model, potential, 2, 50)
    torch.testing.assert_close(twist.log_psi.data, before, rtol=0, atol=0, equal_nan=True)


def test_a_batch_without_positive_weight_teaches_nothing():
    model, _, _ = table_world(2, 2)
    twist = TableTwist.ones(model)
    reports = learn(twist, model, hard_potential(2, 2, {}), 3, 10)
    assert [figures["ess"] for figures in reports] == [0.0, 0.0, 0.0]
    assert (twist.log_psi == 0).all()
