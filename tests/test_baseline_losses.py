"""The losses of DPO and GRPO on given log-probs: formulas, gradients, pairs, advantages."""

import math

import numpy
import pytest
import torch
from worlds import generator

from distill.dpo import dpo_loss, preference_pairs
from distill.finetune import rewards
from distill.grpo import advantages, grpo_loss
from tinystories.errors import InputError
from tsmc.proposal import sample_proposal
from tsmc.table import TableModel, prefix_numbers

INFINITY = math.inf


def random_log_probs(*shape, seed=0):
    """Made-up log-probs of a policy, with gradient, and of a reference, float64."""
    log_pi, log_ref = -torch.rand(2, *shape, dtype=torch.float64, generator=generator(seed)).mul(3)
    return log_pi.requires_grad_(), log_ref


def random_rewards(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=generator(seed))


def test_dpo_loss_is_log_2_at_the_reference_and_pushes_the_pair_apart():
    log_pi, _ = random_log_probs(5, 2)
    loss = dpo_loss(log_pi, log_pi.detach(), 0.4)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-15)
    wanted = torch.tensor([[-0.04, 0.04]] * 5, dtype=torch.float64)
    torch.testing.assert_close(log_pi.grad, wanted)


def test_grpo_loss_is_0_at_the_reference_and_its_gradient_is_not():
    log_pi, _ = random_log_probs(6, 4)
    advantage = advantages(torch.arange(6.0))
    loss = grpo_loss(log_pi, log_pi.detach(), advantage, 0.3)
    loss.backward()
    assert abs(loss.item()) < 1e-15
    torch.testing.assert_close(log_pi.grad, -advantage[:, None].expand(6, 4) / 24)
    assert log_pi.grad.abs().min() > 0.01


def test_losses_equal_the_published_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping, in numpy."""
    log_pi, log_ref = random_log_probs(8, 5, seed=1)
    reward, b = random_rewards(8, 2), 0.2
    pi, ref, r = (x.detach().numpy() for x in (log_pi, log_ref, reward))
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
    value = grpo_loss(log_pi, log_ref, advantages(reward), b)
    assert value.item() == pytest.approx(-total / 40, rel=1e-12)


def policy_gradient(model: TableModel, tokens, coefficients) -> torch.Tensor:
    """Gradient of the sum of coefficients [N, T] times log pi: one-hot minus probabilities."""
    gradient = torch.zeros_like(model.table)
    for n, numbers in enumerate(prefix_numbers(tokens, model.vocab_size)):
        for t, row in enumerate(numbers):
            gradient[row] -= coefficients[n, t] * model.table[row].detach().softmax(-1)
            gradient[row, tokens[n, t]] += coefficients[n, t]
    return gradient


def test_gradients_have_their_closed_forms_in_a_table_world():
    base, policy = (TableModel.random(3, 3, generator(seed)) for seed in (0, 1))
    tokens = sample_proposal(policy, None, 10, generator(2)).tokens
    reward, b = random_rewards(10, 3), 0.3
    log_pi, log_ref = policy.log_probs(tokens)[0], base.log_probs(tokens)[0].detach()

    def assert_gradient(loss, coefficients) -> None:
        actual = torch.autograd.grad(loss, policy.table, retain_graph=True)[0]
        wanted = policy_gradient(policy, tokens, coefficients)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-14)

    pairs = preference_pairs(reward)
    log_ratio = (log_pi - log_ref).sum(-1).detach()
    coefficients = torch.zeros(10, 3, dtype=torch.float64)
    for better, worse in pairs.tolist():
        push = b / 5 * torch.sigmoid(b * (log_ratio[worse] - log_ratio[better]))
        coefficients[better], coefficients[worse] = -push, push
    assert_gradient(dpo_loss(log_pi.sum(-1)[pairs], log_ref.sum(-1)[pairs], b), coefficients)
    advantage = advantages(reward)
    coefficients = (b * (1 - (log_ref - log_pi).exp()) - advantage[:, None]).detach() / 30
    assert_gradient(grpo_loss(log_pi, log_ref, advantage, b), coefficients)


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


@pytest.mark.parametrize("bad", [math.nan, INFINITY])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(InputError, match=r"^log phi is NaN or \+inf .*potential$"):
        rewards(lambda tokens: torch.tensor([-1.0, bad]), torch.zeros(2, 4))
