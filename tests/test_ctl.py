"""Contrastive twist learning against the enumerated gradient; the twist; the file of a pair."""

import copy
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import generator, hard_potential, log_q, seen, table_world, tiny_conditional

import distill.paper
from distill.pair import Pair, load_pair, save_pair
from distill.paper import Paper
from eval.options import Options
from tsmc.exact import TableModel, TableTwist, Target
from tsmc.sigma import Sigma
from tsmc.streams import Streams
from twist.ctl import ctl_loss, draw_batch
from twist.mlp import TwistMLP


def estimated_gradient(sigma, twist, batch_size, source) -> torch.Tensor:
    """The gradient of CTL by one batch, shaped like the table of the twist."""
    loss = ctl_loss(twist, draw_batch(sigma, twist, batch_size, source))
    return torch.autograd.grad(loss, twist.log_psi)[0]


@pytest.mark.learned
@pytest.mark.parametrize("end", [(), (1,)], ids=["", "texts end"])
@pytest.mark.parametrize("m", [0, 1])
def test_mean_gradient_of_many_batches_is_the_enumerated_one(m, end):
    """Batches of 2000 leave a bias of self-normalised weights far below the standard error."""
    base, twist, potential = table_world(3, 3, seed=1, scale=0.8, end=end)
    student = TableModel(TableModel.random(3, 3, generator(9)).table, 3, end)
    sigma, source = Sigma(student if m > 0 else base, base, potential), generator(2)
    target = Target(sigma.model, seen(sigma))
    wanted = Target(base, potential).log_sigma[-1]  # the target stays while p changes (eq. 8)
    torch.testing.assert_close(target.log_sigma[-1], wanted)
    gradients = torch.stack([estimated_gradient(sigma, twist, 2000, source) for _ in range(40)])
    (exact,) = torch.autograd.grad(target.ctl_loss(twist), twist.log_psi)
    never = exact == 0  # prefixes that no text has
    assert (gradients[:, never] == 0).all() and never.any() == bool(end)
    mean, error = gradients.mean(0)[~never], gradients.std(0)[~never] / 40**0.5
    assert ((mean - exact[~never]) / error).abs().max() < 5  # of at most 39 components
    assert (mean / error).abs().max() > 20  # they can tell the gradient from none
    # At the optimal twist all weights are equal, so positives and negatives cancel one by one.
    optimal = TableTwist(target.optimal_log_psi().detach())
    assert estimated_gradient(sigma, optimal, 64, generator(0)).abs().max() < 1e-12


def learn(kind, twist, model, log_phi, updates, rate) -> Paper:
    """A learner after line 4 of Algorithm 1 with a table as its twist."""
    options = Options(ctl_updates=updates, ctl_batch_size=50, ctl_learning_rate=rate)
    learner = kind(model, log_phi, options, Streams(0))
    with mock.patch.object(distill.paper, "TwistMLP", lambda *_: twist):
        assert learner.learn_twist(model, 1).twist is twist
    return learner


def test_the_step_size_falls_linearly_to_a_tenth_and_the_objective_can_be_another():
    """A step of Adam is its step size where every gradient is one. A batch without positive weight
    teaches nothing."""

    class Sum(Paper):
        def twist_loss(self, psi, batch, model):
            return psi.log_psi.sum()

    model, twist, potential = table_world(2, 3)
    before = twist.log_psi.detach().clone()
    learn(Sum, twist, model, potential, 5, 0.1)
    wanted = torch.full_like(before, 0.1 * (1 + 0.82 + 0.64 + 0.46 + 0.28))
    torch.testing.assert_close(before - twist.log_psi, wanted)
    twist = TableTwist(before)
    learner = learn(Paper, twist, model, hard_potential({}), 3, 0.1)
    assert learner.figures["twist_ess"] == [0.0, 0.0, 0.0] and torch.equal(twist.log_psi, before)


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden, tokens = torch.randn(5, 4, 8, generator=generator(1)), torch.arange(20).view(5, 4) % 7
    twist = TwistMLP(8, 7, generator(0))
    assert torch.equal(twist(hidden), torch.zeros(5, 4, 7))
    for parameter in twist.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator(4))
    expected = twist(hidden).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(twist.of_tokens(hidden, tokens), expected)


def test_a_pair_is_kept_as_it_is_and_a_file_of_another_is_refused(tmp_path):
    """Each tensor is left out or of another shape; or one too many is there."""
    path, base = tmp_path / "pair.safetensors", tiny_conditional(0, (3,))
    pair = Pair(tiny_conditional(1, (3,)), TwistMLP(base.width, 7, generator(0)))
    torch.nn.init.normal_(pair.twist.last.weight, generator=generator(1))
    save_pair(path, pair, base, {"pool": torch.arange(3)})
    found, state = load_pair(path, base)
    assert torch.equal(log_q(found), log_q(pair)) and state["pool"].tolist() == [0, 1, 2]
    tensors = load_file(path)
    others = [tensors | {"twist.x": torch.ones(1)}]
    for name in ("twist.last.bias", "model.transformer.wte.weight"):
        others += [tensors | {name: tensors[name][1:].clone()}, copy.copy(tensors)]
        del others[-1][name]
    for other in others:
        save_file(other, path, {"model": ""})
        with pytest.raises(RuntimeError, match="loading state_dict"):
            load_pair(path, base)
    save_pair(path, Pair(base, None), base, {})
    assert load_pair(path, base) == (Pair(base, None), {})
