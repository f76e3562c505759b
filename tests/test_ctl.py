"""Contrastive twist learning against the enumerated gradient; the twist; the file of a pair."""

from unittest import mock

import pytest
import torch
import worlds
from safetensors.torch import load_file, save_file
from tinystories.files import read_metadata
from twist.objectives import dpg_loss, sixo_loss
from worlds import generator, log_q, recorded, table_world, tiny_conditional

import distill.paper
from distill import Paper, PaperOptions, Streams
from distill.pair import Pair, load_pair, save_pair
from distill.pooled.adapter import Adapted, Adapter
from tsmc.exact import TableModel, TableTwist, Target
from tsmc.sigma import seen_from
from twist.ctl import ctl_loss, draw_batch
from twist.mlp import TwistMLP


def estimated_gradient(sigma, twist, batch_size, source, objective=ctl_loss) -> torch.Tensor:
    """The gradient of one batch, shaped like the table of the twist."""
    loss = objective(twist, draw_batch(sigma, twist, batch_size, source))
    return torch.autograd.grad(loss, twist.log_psi)[0]


@pytest.mark.learned
@pytest.mark.parametrize("world", ["p^(0)", "p^(1)", "texts end"])
def test_mean_gradient_of_many_batches_is_the_enumerated_one(world):
    """Batches of 4000 leave a bias of self-normalised weights far below the standard error."""
    base, twist, potential = table_world(3, 3, seed=1, scale=0.8)
    if world == "texts end":
        base, twist, potential = worlds.ended_world(3, 3)
    model = TableModel.random(3, 3, generator(9)) if world == "p^(1)" else base
    sigma, source = seen_from(model, base, potential), generator(2)
    gradients = torch.stack([estimated_gradient(sigma, twist, 4000, source) for _ in range(100)])
    target = Target(model, sigma.log_potential)
    (exact,) = torch.autograd.grad(target.ctl_loss(twist), twist.log_psi)
    is_behind = exact == 0  # behind the end psi waits, so there is no gradient
    assert is_behind.sum() == (18 if world == "texts end" else 0)
    assert not gradients[:, is_behind].any()
    mean, error = gradients.mean(0)[~is_behind], gradients.std(0)[~is_behind] / 100**0.5
    z = (mean - exact[~is_behind]) / error
    assert z.abs().max() < 5  # of at most 39 components
    assert (mean / error).abs().max() > 20  # they can tell the gradient from none
    # At the optimal twist all weights are equal, so positives and negatives cancel one by one.
    optimal = TableTwist(target.optimal_log_psi().detach())
    assert estimated_gradient(sigma, optimal, 64, generator(0)).abs().max() < 1e-12
    # SIXO's optimum is psi* / Z, where its gradient vanishes on average.
    ratio = TableTwist((target.optimal_log_psi() - target.log_z).detach())
    found = [estimated_gradient(sigma, one, 4000, source, sixo_loss) for one in (ratio, twist)]
    assert found[0].abs().max() < 0.1 * found[1].abs().max()


@pytest.mark.learned
@pytest.mark.parametrize("is_ended", [False, True])
def test_the_objective_of_dpg_is_the_likelihood_of_q_under_sigma(is_ended):
    model, twist, potential = worlds.ended_world(3, 3) if is_ended else table_world(3, 3, seed=1)
    sigma, source = seen_from(model, model, potential), generator(2)
    target = Target(model, sigma.log_potential)
    exact_log_q = target.tree.prefix_log_q(twist)[-1]  # [V^T]
    loss = -torch.where(target.log_sigma[-1] > -torch.inf, exact_log_q, 0.0)
    (exact,) = torch.autograd.grad((target.log_sigma[-1].exp() * loss).sum(), twist.log_psi)
    drawn = [estimated_gradient(sigma, twist, 4000, source, dpg_loss) for _ in range(100)]
    gradients = torch.stack(drawn)
    mean, error = gradients.mean(0), gradients.std(0) / 100**0.5
    is_behind = exact == 0
    assert is_behind.sum() == (18 if is_ended else 0) and not gradients[:, is_behind].any()
    assert ((mean - exact) / error)[~is_behind].abs().max() < 5
    assert (mean / error)[~is_behind].abs().max() > 20


def learn(twist, model, log_phi, updates, rate=2e-4, kind=Paper) -> list[float]:
    """Line 4 of Algorithm 1 with a table as its twist; the ESS of each batch of 50."""
    options = PaperOptions(ctl_updates=updates, ctl_batch_size=50, ctl_learning_rate=rate)
    learner = kind(model, log_phi, options, Streams(0))
    with mock.patch.object(distill.paper, "TwistMLP", lambda *_: twist):
        assert learner.learn_twist(model, 1).twist is twist
    return recorded(learner, "twist learning", "ess")


def test_the_step_size_falls_linearly_to_a_tenth_and_the_objective_can_be_another():
    """A step of Adam is its step size where every gradient is one."""

    class Sum(Paper):
        def twist_loss(self, psi, batch):
            return psi.log_psi.sum()

    model, twist, potential = table_world(2, 2)
    before = twist.log_psi.detach().clone()
    learn(twist, model, potential, 5, 0.1, Sum)
    wanted = torch.full_like(before, 0.1 * (1 + 0.82 + 0.64 + 0.46 + 0.28))
    torch.testing.assert_close(before - twist.log_psi, wanted)


def test_an_exploded_twist_stops_and_a_batch_without_positive_weight_teaches_nothing():
    for psi in (3000.0, torch.nan):
        model, twist, potential = table_world(3, 3, seed=3)
        twist.log_psi.data[..., 0] += psi
        words = r"^twist learning of generation 1: psi has exploded .*; lower --ctl-learning-rate"
        with pytest.raises(ValueError, match=words):
            learn(twist, model, potential, 2)
    model = table_world(2, 3)[0]
    twist = TableTwist(torch.zeros_like(model.table))
    assert learn(twist, model, worlds.hard_potential({}), 3) == [0.0, 0.0, 0.0]
    assert (twist.log_psi == 0).all()


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden, tokens = torch.randn(5, 4, 8, generator=generator(1)), torch.arange(20).view(5, 4) % 7
    twist = TwistMLP(8, 7, generator(0))
    assert torch.equal(twist(hidden), torch.zeros(5, 4, 7))
    for parameter in twist.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator(4))
    expected = twist(hidden).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(twist.of_tokens(hidden, tokens), expected)


BASE = tiny_conditional(0)
ADAPTED = Adapted(BASE, Adapter(BASE, torch.linspace(-1, 1, 7), generator(0)))
PAIRS = [Pair(tiny_conditional(1), TwistMLP(8, 7, generator(0))), Pair(ADAPTED, None)]


@pytest.mark.parametrize("pair", PAIRS, ids=["psi over p^(1)", "adapter"])
def test_a_file_that_holds_no_pair_is_refused_in_one_line(tmp_path, pair):
    """Each tensor is left out, of another shape or not finite; or one too many is there."""
    path = tmp_path / "pair.safetensors"
    save_pair(path, pair, BASE)
    torch.testing.assert_close(log_q(load_pair(path, BASE)), log_q(pair), rtol=0, atol=1e-5)
    tensors, told = load_file(path), read_metadata(path)
    damaged = [(tensors | {"x.y": torch.ones(1)}, told), (tensors, None)]
    for name, value in tensors.items():
        others = {key: tensors[key] for key in tensors if key != name}
        longer, wrong = torch.cat([value, value[:1]]), torch.full_like(value, torch.nan)
        damaged += [(others | one, told) for one in ({name: longer}, {name: wrong}, {})]
    for content, metadata in damaged:
        save_file(content, path, metadata)
        with pytest.raises(ValueError, match=f"^{path}: "):
            load_pair(path, BASE)
