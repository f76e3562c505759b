"""Contrastive twist learning against the enumerated gradient, and what it achieves in a world whose optimum is known."""

import pytest
import torch
from worlds import ListedPotential, Recorded, generator, learn, table_world

from tinystories.errors import InputError
from tsmc.exact import Target
from tsmc.steps import Steps
from tsmc.table import TableModel, TableTwist
from tsmc.trajectories import sample_proposal
from twist.ctl import ctl_loss, negative_log_weights, positive_log_weights, weigh
from twist.potential import effective_potential


def estimated_gradient(model, twist, potential, batch_size, source) -> torch.Tensor:
    """The CTL gradient of one batch, shaped like the table of the twist."""
    batch = sample_proposal(model, twist, batch_size, source, keep_hidden=True)
    weighted = weigh(batch, positive_log_weights(batch, potential), negative_log_weights(batch))
    loss = ctl_loss(twist, weighted)
    return torch.autograd.grad(loss, twist.log_psi)[0]


def exact_gradient(model, twist, potential) -> torch.Tensor:
    """The enumerated CTL gradient."""
    return torch.autograd.grad(Target(model, potential).ctl_loss(twist), twist.log_psi)[0]


def world_of_generation(number: int):
    """Base, model, twist and the potential that goes with the model, at generation 0 or 1."""
    base, twist, potential = table_world(3, 3, seed=1, scale=0.8)
    if number == 0:
        return base, base, twist, potential
    return base, TableModel.random(3, 3, generator(9)), twist, effective_potential(potential, base)


@pytest.mark.parametrize("number", [0, 1])
def test_mean_gradient_of_many_batches_is_the_enumerated_one(number):
    """Batches of 4000 leave a bias of self-normalised weights far below the standard error over 100 batches."""
    _, model, twist, potential = world_of_generation(number)
    source = generator(2)
    gradients = torch.stack([estimated_gradient(model, twist, potential, 4000, source) for _ in range(100)])
    error = gradients.std(0) / 100**0.5
    z = (gradients.mean(0) - exact_gradient(model, twist, potential)) / error
    assert z.abs().max() < 4.5  # 39 components
    assert 0.4 < z.square().mean() < 1.9
    wrong = torch.zeros_like(z).sub(gradients.mean(0)) / error
    assert wrong.abs().max() > 20  # the errors are small enough to tell the gradient from none


def test_weights_of_generation_one_belong_to_the_same_sigma():
    """E_q[w 1(s)] = p^(0) phi(s): the importance weights estimate Z_sigma sigma(s) for every s, summed over all s."""
    base, model, twist, potential = world_of_generation(1)
    target = Target(base, table_world(3, 3, seed=1, scale=0.8)[2])
    sequences = target.tree.sequences()
    log_p, logits, hidden = model.log_probs(sequences)
    log_q = (logits + twist(hidden)).log_softmax(-1).gather(-1, sequences[..., None])[..., 0]
    batch = sample_proposal(model, twist, len(sequences), generator(0), keep_hidden=True)
    batch.tokens, batch.log_p, batch.log_q = sequences, log_p, log_q
    joint = positive_log_weights(batch, potential) + log_q.sum(-1)
    torch.testing.assert_close(joint, target.log_sigma[-1] + target.log_z, rtol=0, atol=1e-10)


def test_gradient_flows_through_no_weight():
    model, twist, potential = table_world(3, 3, seed=3)
    batch = sample_proposal(model, twist, 50, generator(0), keep_hidden=True)
    positive = positive_log_weights(batch, potential).detach().requires_grad_()
    negative = negative_log_weights(batch).detach().requires_grad_()
    loss = ctl_loss(twist, weigh(batch, positive, negative))
    gradients = torch.autograd.grad(loss, [twist.log_psi, positive, negative], allow_unused=True)
    assert gradients[1] is None and gradients[2] is None
    by_hand = torch.zeros_like(twist.log_psi)
    shares = negative.softmax(0) - positive.softmax(0)[:, None]  # [K, T]
    for k in range(50):
        for t in range(3):
            by_hand[int(batch.hidden[k, t, 0]), batch.tokens[k, t]] += shares[k, t].detach()
    torch.testing.assert_close(gradients[0], by_hand, rtol=0, atol=1e-12)


def test_gradient_does_not_change_with_a_constant_per_step():
    model, twist, potential = table_world(3, 3, seed=4)
    shift = torch.tensor([5.0, -2.0, 30.0]).double().repeat_interleave(torch.tensor([1, 3, 9]))[:, None]
    shifted = TableTwist(twist.log_psi.detach() + shift)
    plain = estimated_gradient(model, twist, potential, 64, generator(0))
    moved = estimated_gradient(model, shifted, potential, 64, generator(0))
    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-10)
    torch.testing.assert_close(exact_gradient(model, shifted, potential), exact_gradient(model, twist, potential))


def test_gradient_vanishes_at_the_optimal_twist():
    model, _, potential = table_world(3, 3, seed=5)
    optimal = TableTwist(Target(model, potential).optimal_log_psi())
    assert exact_gradient(model, optimal, potential).abs().max() < 1e-12
    batch_gradient = estimated_gradient(model, optimal, potential, 64, generator(0))
    assert batch_gradient.abs().max() < 1e-12  # every weight is equal, so positives and negatives cancel one by one


@pytest.mark.parametrize("number", [0, 1])
def test_learning_brings_the_proposal_to_sigma(number):
    """Exact KL(sigma || q) falls under 2 % of where it starts, psi = 1."""
    _, model, _, potential = world_of_generation(number)
    target, twist = Target(model, potential), TableTwist.ones(model)

    def divergence() -> float:
        return target.kl_to(target.tree.prefix_log_q(twist)[-1].detach())

    before = divergence()
    last_rate = learn(twist, model, potential, Steps(300), 500, learning_rate=0.05, seed=3)
    assert last_rate == pytest.approx(0.05 * (1 - 0.9 * 299 / 300))
    assert before > 0.05 and divergence() < 0.02 * before


def test_exact_gradient_descends_to_the_optimum():
    model, _, potential = table_world(3, 3, seed=6)
    target, twist = Target(model, potential), TableTwist.ones(model)
    optimizer = torch.optim.Adam(twist.parameters(), lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        target.ctl_loss(twist).backward()
        optimizer.step()
    assert target.kl_to(target.tree.prefix_log_q(twist)[-1].detach()) < 1e-4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_refused(bad):
    model, twist, potential = table_world(3, 3, seed=3)
    batch = sample_proposal(model, twist, 4, generator(0), keep_hidden=True)
    for place in (0, 1):
        weights = [positive_log_weights(batch, potential), negative_log_weights(batch)]
        weights[place][-1] = bad
        with pytest.raises(InputError, match=r"^twist learning: a weight is NaN or infinite"):
            weigh(batch, *weights)


def test_an_exploded_twist_stops_before_the_step():
    model, twist, potential = table_world(3, 3, seed=3)
    twist.log_psi.data[..., 0] += 3000
    before = twist.log_psi.detach().clone()
    with pytest.raises(InputError, match=r"^twist learning: the twist has exploded.*; lower the learning rate$"):
        learn(twist, model, potential, Steps(2), 50)
    assert torch.equal(twist.log_psi, before)


def test_a_batch_without_positive_weight_teaches_nothing():
    model, _, _ = table_world(2, 2)
    twist, steps = TableTwist.ones(model), Recorded(3)
    nothing = ListedPotential(torch.full((4,), -torch.inf).double(), 2)
    learn(twist, model, nothing, steps, 10)
    assert [figures["ess"] for figures in steps.reports] == [0.0, 0.0, 0.0] and (twist.log_psi == 0).all()
