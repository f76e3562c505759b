"""Contrastive twist learning against the enumerated gradient; the twist; the file of a pair."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import generator, hard_potential, log_q, table_world, tiny_conditional

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
@pytest.mark.parametrize("world", ["p^(0)", "p^(1)", "texts end", "texts end, p^(1)"])
def test_mean_gradient_of_many_batches_is_the_enumerated_one(world):
    """Batches of 4000 leave a bias of self-normalised weights far below the standard error."""
    end = (1,) if "end" in world else ()
    base, twist, potential = table_world(3, 3, seed=1, scale=0.8, end=end)
    student = TableModel(TableModel.random(3, 3, generator(9)).table, 3, end)
    model = student if "p^(1)" in world else base
    sigma, source = Sigma(model, base, potential), generator(2)
    gradients = torch.stack([estimated_gradient(sigma, twist, 4000, source) for _ in range(60)])
    target = Target(base, potential)  # sigma by p^(0) phi, whichever model draws
    for t, log_p in enumerate(Target(model, lambda tokens: 0.0 * tokens.sum(1)).log_p):
        target.log_p[t] = log_p  # pi_t is by p^(m)
    target.tree.hidden = Target(model, potential).tree.hidden
    (exact,) = torch.autograd.grad(target.ctl_loss(twist), twist.log_psi)
    never = exact == 0  # behind the end of a text there is nothing to learn
    assert (gradients[:, never].abs() < 1e-12).all() and (never.sum() > 0) == bool(end)
    mean, error = gradients.mean(0)[~never], gradients.std(0)[~never] / 60**0.5
    assert ((mean - exact[~never]) / error).abs().max() < 5  # of at most 39 components
    assert (mean / error).abs().max() > 20  # they can tell the gradient from none
    # At the optimal twist all weights are equal, so positives and negatives cancel one by one.
    optimal = TableTwist(Target(model, sigma_seen(sigma)).optimal_log_psi().detach())
    assert estimated_gradient(sigma, optimal, 64, generator(0)).abs().max() < 1e-12


def sigma_seen(sigma: Sigma):
    """phi^(m) of all sequences, by enumeration of p^(0) and p^(m)."""
    first, later = (Target(one, lambda x: 0.0 * x.sum(1)).log_p[-1] for one in (sigma.base, sigma.model))
    log_ratio = torch.where(first > -torch.inf, first - later, 0.0)
    return lambda tokens: log_ratio + sigma.log_phi(tokens)


def test_the_target_stays_while_p_changes():
    """eq. 8 on all sequences, and that only p^(0) is guided by a prefix part."""
    base, _, potential = table_world(3, 3, seed=1)
    potential.has_prefix, potential.log_f = True, [torch.zeros(3**t) for t in range(4)]
    model = TableModel.random(3, 3, generator(9))
    first, later, drifting = (
        Sigma(base, base, potential),
        Sigma(model, base, potential),
        Sigma(model, base, potential, False),
    )
    seen = [Target(one.model, lambda x, one=one: one.log_potential(x, log_p(one, x))) for one in (first, later)]
    torch.testing.assert_close(seen[1].log_sigma[-1], seen[0].log_sigma[-1])
    assert (first.has_prefix, later.has_prefix) == (True, False)


def log_p(sigma: Sigma, tokens: torch.Tensor) -> torch.Tensor:
    return sigma.model.log_probs(tokens).sum(1)
