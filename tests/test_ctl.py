"""Contrastive twist learning against the enumerated gradient, and what it achieves."""

import pytest
import torch
from worlds import generator, hard_potential, learn, table_world

from tinystories.errors import InputError
from tsmc.exact import TableModel, TableTwist, Target
from tsmc.proposal import sample_proposal
from twist.ctl import ctl_loss, negative_log_weights, positive_log_weights, weigh
from twist.potential import effective_potential


def estimated_gradient(model, twist, potential, batch_size, source) -> torch.Tensor:
    """The CTL gradient of one batch, shaped like the table of the twist."""
    batch = sample_proposal(model, twist, batch_size, source, keep_hidden=True)
    positive = positive_log_weights(batch, potential)
    loss = ctl_loss(twist, weigh(batch, positive, negative_log_weights(batch)))
    return torch.autograd.grad(loss, twist.log_psi)[0]


def exact_gradient(model, twist, potential) -> torch.Tensor:
    """The enumerated CTL gradient."""
    return torch.autograd.grad(Target(model, potential).ctl_loss(twist), twist.log_psi)[0]


def world_of_generation(number: int):
    """Model, twist and potential of generation 0 or 1."""
    base, twist, potential = table_world(3, 3, seed=1, scale=0.8)
    if number == 0:
        return base, twist, potential
    return TableModel.random(3, 3, generator(9)), twist, effective_potential(potential, base)


@pytest.mark.parametrize("number", [0, 1])
def test_mean_gradient_of_many_batches_is_the_enumerated_one(number):
    """Batches of 4000 leave a bias of self-normalised weights far below the standard error."""
    model, twist, potential = world_of_generation(number)
    source = generator(2)
    estimates = [estimated_gradient(model, twist, potential, 4000, source) for _ in range(100)]
    gradients = torch.stack(estimates)
    error = gradients.std(0) / 100**0.5
    z = (gradients.mean(0) - exact_gradient(model, twist, potential)) / error
    assert z.abs().max() < 4.5  # 39 components
    assert 0.4 < z.square().mean() < 1.9
    assert (gradients.mean(0) / error).abs().max() > 20  # they can tell the gradient from none


def test_gradient_flows_through_no_weight():
    model, twist, potential = table_world(3, 3, seed=3)
    batch = sample_proposal(model, twist, 50, generator(0), keep_hidden=True)
    positive = positive_log_weights(batch, potential).detach().requires_grad_()
    negative = negative_log_weights(batch).detach().requires_grad_()
    loss = ctl_loss(twist, weigh(batch, positive, negative))
    inputs = [twist.log_psi, positive, negative]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    assert gradients[1] is None and gradients[2] is None
    by_hand = torch.zeros_like(twist.log_psi)
    shares = negative.softmax(0) - positive.softmax(0)[:, None]  # [K, T]
    for k in range(50):
        for t in range(3):
            by_hand[int(batch.hidden[k, t, 0]), batch.tokens[k, t]] += shares[k, t].detach()
    torch.testing.assert_close(gradients[0], by_hand, rtol=0, atol=1e-12)


def test_a_constant_added_to_log_psi_changes_no_gradient():
    model, twist, potential = table_world(3, 3, seed=4)
    gradients = []
    for constant in (0.0, 5.0):
        twist.log_psi.data += constant
        gradients.append(estimated_gradient(model, twist, potential, 50, generator(0)))
        assert gradients[-1].sum().abs() < 1e-12, "positive and negative weights sum to one"
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_gradient_vanishes_at_the_optimal_twist():
    """All weights of a batch are equal there, so positives and negatives cancel one by one."""
    model, _, potential = table_world(3, 3, seed=5)
    optimal = TableTwist(Target(model, potential).optimal_log_psi())
    assert exact_gradient(model, optimal, potential).abs().max() < 1e-12
    assert estimated_gradient(model, optimal, potential, 64, generator(0)).abs().max() < 1e-12


@pytest.mark.parametrize("number", [0, 1])
def test_learning_brings_the_proposal_to_sigma(number):
    """Exact KL(sigma || q) falls under 2 % of where it starts, psi = 1."""
    model, _, potential = world_of_generation(number)
    target, twist = Target(model, potential), TableTwist.ones(model)

    def divergence() -> float:
        return target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())

    before = divergence()
    reports = learn(twist, model, potential, 300, 500, learning_rate=0.05, seed=3)
    assert before > 0.05 and divergence() < 0.02 * before
    assert reports.last_rate == pytest.approx(0.05 * (1 - 0.9 * 299 / 300))
    assert len(reports) == 300 and all(1 <= figures["ess"] <= 500.001 for figures in reports)
    assert reports[-1]["ess"] > 1.1 * reports[0]["ess"], "a better proposal has more even weights"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_weight_that_is_not_finite_is_refused(bad, place):
    model, twist, potential = table_world(3, 3, seed=3)
    batch = sample_proposal(model, twist, 4, generator(0), keep_hidden=True)
    weights = [positive_log_weights(batch, potential), negative_log_weights(batch)]
    weights[place][-1] = bad
    with pytest.raises(InputError, match=r"^twist learning: a weight is NaN or infinite"):
        weigh(batch, *weights)


def test_an_exploded_twist_stops_before_the_step():
    model, twist, potential = table_world(3, 3, seed=3)
    twist.log_psi.data[..., 0] += 3000
    before = twist.log_psi.detach().clone()
    words = r"^twist learning: the twist has exploded.*; lower the learning rate$"
    with pytest.raises(InputError, match=words):
        learn(twist, model, potential, 2, 50)
    assert torch.equal(twist.log_psi, before)


def test_a_batch_without_positive_weight_teaches_nothing():
    model, _, _ = table_world(2, 2)
    twist = TableTwist.ones(model)
    reports = learn(twist, model, hard_potential(2, 2, {}), 3, 10)
    assert [figures["ess"] for figures in reports] == [0.0, 0.0, 0.0]
    assert (twist.log_psi == 0).all()
