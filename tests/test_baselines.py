"""DPO, GRPO and RL: whole runs in a world that can be enumerated, losses, guards."""

import math

import numpy
import pytest
import torch
from worlds import generator, gpt_neo_world, log_q, recorded, tiny_conditional

from distill import DPO, GRPO, LEARNERS, RL, BaselineOptions, RLOptions, Streams
from distill.dpo import dpo_loss, preference_pairs
from distill.grpo import advantages, grpo_loss
from tinystories.decoder import counted
from tsmc.exact import Target, kl_divergence
from twist.pair import Pair


@pytest.mark.parametrize(
    ("kind", "student", "rate", "loss"),
    [(DPO, "full", 1e-2, math.log(2)), (GRPO, "lora", 3e-2, 0.0)],
)
def test_the_policy_gains_reward_by_samples_of_the_right_model(kind, student, rate, loss):
    """DPO samples the reference, GRPO the current policy. What the loss is at first is known."""
    base, _, potential = gpt_neo_world(3, 3)  # 27 sequences, float64
    rewards = []

    def log_phi(tokens):
        rewards.append(3 * potential(tokens))
        return rewards[-1]

    options = BaselineOptions(student, rate, strength=0.1, updates=40, batch_size=64)
    learner = kind(base, log_phi, options, Streams(0))
    pair = learner.first_twist()
    assert pair.twist is None and len(torch.cat(rewards)) == learner.scores(0)
    policies = (Pair(base, None), pair)
    before, after = (3 * log_q(policy).exp() @ potential.log_phi for policy in policies)
    assert after > before + 0.5
    sampled = before if kind is DPO else after
    assert abs(torch.cat(rewards[-10:]).mean() - sampled) < 0.2
    losses = recorded(learner, "fine-tuning", "loss")
    assert len(losses) == 40 and losses[0] == pytest.approx(loss, abs=1e-12)


def test_rl_approaches_sigma_and_its_objective_log_z():
    base, _, potential = gpt_neo_world(3, 3)
    target = Target(base, potential)
    learner = RL(base, potential, RLOptions(learning_rate=1e-2, updates=60), Streams(0))
    log_pi, log_sigma = log_q(learner.first_twist()), target.log_sigma[-1]
    kl = kl_divergence(log_pi, log_sigma)
    assert kl < 0.2 * kl_divergence(target.log_p[-1], log_sigma)
    objective = sum(recorded(learner, "fine-tuning", "objective")[-10:]) / 10
    assert objective == pytest.approx(target.log_z - kl.item(), abs=0.1)


def test_losses_and_the_gradient_of_grpo_equal_the_published_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping, in numpy.

    Texts count alike, whether they have 2 tokens up to their end or 5.
    """
    source, b = generator(1), 0.2
    log_pi, log_ref = -3 * torch.rand(2, 8, 5, dtype=torch.float64, generator=source)
    reward = torch.randn(8, dtype=torch.float64, generator=source)
    pi, ref, r = log_pi.exp().numpy(), log_ref.exp().numpy(), reward.numpy()
    ranked = sorted(range(8), key=lambda i: -r[i])
    terms = []
    for better, worse in zip(ranked[:4], ranked[4:], strict=True):
        ratios = [numpy.prod(pi[i] / ref[i]) for i in (better, worse)]
        terms.append(-numpy.log(1 / (1 + (ratios[1] / ratios[0]) ** b)))
    pairs = preference_pairs(reward)
    value = dpo_loss(log_pi.sum(-1)[pairs], log_ref.sum(-1)[pairs], b)
    assert value.item() == pytest.approx(numpy.mean(terms), rel=1e-12)
    is_counted = counted(torch.tensor([[0, 1, 1, 1, 1]] * 3 + [[0, 0, 0, 0, 0]] * 5), 1)
    share = is_counted.numpy() / is_counted.sum(1, keepdim=True).numpy() / 8  # of each token
    advantage = ((r - numpy.mean(r)) / numpy.std(r))[:, None]
    x = ref / pi
    log_pi.requires_grad_()
    value = grpo_loss(log_pi, log_ref, advantages(reward), b, is_counted)
    wanted = -numpy.sum(share * (advantage - b * (x - numpy.log(x) - 1)))
    assert value.item() == pytest.approx(wanted, rel=1e-12)
    (gradient,) = torch.autograd.grad(value, log_pi)
    wanted = torch.from_numpy(-share * (advantage + b * (x - 1)))  # the ratio has been one
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_pairs_and_advantages_of_equal_and_of_impossible_samples():
    """The mean of 1000 float32 numbers equal to -0.1 is not that number."""
    pairs = preference_pairs(torch.tensor([3.0, -math.inf, 5.0, 1.0, -math.inf]))
    assert pairs.tolist() == [[2, 1], [0, 4]], "the middle is left out, ties keep their order"
    for equal in ([-0.1] * 1000, [-math.inf] * 9, [-0.35] * 7 + [-0.35000002]):
        assert (advantages(torch.tensor(equal)) == 0).all()
    reward = torch.tensor([-1.0, -math.inf, -3.0, -math.inf, -2.0])
    limit = advantages(reward.clamp(min=-1e9))  # of a falling reward
    torch.testing.assert_close(advantages(reward), limit, rtol=0, atol=1e-6)
    assert advantages(reward)[1] < 0 < advantages(reward)[0]


@pytest.mark.parametrize("kind", LEARNERS.values())
def test_what_is_no_number_below_infinity_is_no_reward(kind):
    """NaN would be preferred to everything by DPO and be phi = 0 for GRPO."""
    for wrong in (math.nan, math.inf):
        log_phi = lambda tokens, x=wrong: torch.tensor([x] + [0.0] * (len(tokens) - 1))  # noqa: E731
        learner = kind(tiny_conditional(0), log_phi, kind.Options(), Streams(0))
        with pytest.raises(ValueError, match="log phi is NaN or infinite on some text"):
            learner.first_twist()
