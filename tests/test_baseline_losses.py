"""The losses of DPO and GRPO on given log-probs: formulas, gradients, pairs, advantages."""

import math

import numpy
import pytest
import torch
from worlds import generator

from distill.dpo import dpo_loss, preference_pairs
from distill.grpo import advantages, grpo_loss

INFINITY = math.inf


def random_samples(count: int, length: int):
    """Made-up log-probs of a policy, with gradient, and of a reference, and rewards, float64."""
    source = generator(1)
    log_probs = -3 * torch.rand(2, count, length, dtype=torch.float64, generator=source)
    reward = torch.randn(count, dtype=torch.float64, generator=source)
    return log_probs[0].requires_grad_(), log_probs[1], reward


def test_losses_equal_the_published_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping, in numpy."""
    log_pi, log_ref, reward = random_samples(8, 5)
    pi, ref, r = (x.detach().numpy() for x in (log_pi, log_ref, reward))
    b = 0.2
    ranked = sorted(range(8), key=lambda i: -r[i])
    terms = []
    for better, worse in zip(ranked[:4], ranked[4:], strict=True):
        ratios = [numpy.prod(numpy.exp(pi[i]) / numpy.exp(ref[i])) for i in (better, worse)]
        terms.append(-numpy.log(1 / (1 + (ratios[1] / ratios[0]) ** b)))
    pairs = preference_pairs(reward)
    value = dpo_loss(log_pi.sum(-1)[pairs], log_ref.sum(-1)[pairs], b)
    assert value.item() == pytest.approx(numpy.mean(terms), rel=1e-12)
    total = 0.0
    for n in range(8):
        a = (r[n] - numpy.mean(r)) / numpy.std(r)
        for t in range(5):
            x = numpy.exp(ref[n, t]) / numpy.exp(pi[n, t])
            total += a - b * (x - numpy.log(x) - 1)
    value = grpo_loss(log_pi, log_ref, advantages(reward), b, torch.ones(8, 5).bool())
    assert value.item() == pytest.approx(-total / 40, rel=1e-12)


def test_gradients_equal_the_closed_forms():
    """Of DPO -b (1 - sigmoid(b margin)) for the better one; of GRPO -(A + b (x - 1))."""
    log_pi, log_ref, reward = random_samples(8, 5)
    b = 0.2
    pairs = preference_pairs(reward)
    (found,) = torch.autograd.grad(
        dpo_loss(log_pi.sum(-1)[pairs], log_ref.sum(-1)[pairs], b), log_pi
    )
    ratio = (log_pi - log_ref).sum(-1).detach()[pairs]  # [4, 2]
    share = b / 4 * torch.sigmoid(-b * (ratio[:, 0] - ratio[:, 1]))
    expected = torch.zeros(8, dtype=torch.float64)
    expected[pairs[:, 0]], expected[pairs[:, 1]] = -share, share
    torch.testing.assert_close(found, expected[:, None].expand(8, 5), rtol=0, atol=1e-12)
    loss = grpo_loss(log_pi, log_ref, advantages(reward), b, torch.ones(8, 5).bool())
    (found,) = torch.autograd.grad(loss, log_pi)
    x = (log_ref - log_pi.detach()).exp()
    standard = (reward - reward.mean()) / reward.std(correction=0)
    expected = -(standard[:, None] + b * (x - 1)) / 40
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_pairs_join_the_halves_rank_by_rank_and_leave_out_the_middle():
    pairs = preference_pairs(torch.tensor([3.0, -INFINITY, 5.0, 1.0, -INFINITY]))
    assert pairs.tolist() == [[2, 1], [0, 4]]
    assert preference_pairs(torch.zeros(4)).tolist() == [[0, 2], [1, 3]], "ties keep their order"


@pytest.mark.parametrize("value", [-0.1, 0.0, -34.7, -INFINITY])
def test_equal_rewards_give_no_advantage(value):
    """The mean of 1000 float32 numbers equal to -0.1 is not that number."""
    assert (advantages(torch.full((1000,), value)) == 0).all()


def test_an_impossible_sample_counts_as_the_limit_of_a_falling_reward():
    reward = torch.tensor([-1.0, -INFINITY, -3.0, -INFINITY, -2.0])
    limit = advantages(reward.clamp(min=-1e9))
    torch.testing.assert_close(advantages(reward), limit, rtol=0, atol=1e-6)
    assert advantages(reward)[1] < 0 < advantages(reward)[0]
