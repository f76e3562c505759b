"""DPO and GRPO: whole runs in a world that can be enumerated, losses, guards."""

import importlib
import math

import numpy
import pytest
import torch
from worlds import ListedPotential, Recorded, generator, gpt_neo_world

from distill import DPO, GRPO, BaselineOptions, Streams
from distill.dpo import dpo_loss, preference_pairs
from distill.finetune import Student
from distill.grpo import advantages, grpo_loss
from tsmc.exact import Tree

BASELINES = {"dpo": DPO, "grpo": GRPO}
both = pytest.mark.parametrize("name", BASELINES)


def train(name, base, log_phi, **changes):
    """The policy, and the figures of its updates."""
    options = {"strength": 0.1, "learning_rate": 1e-2, "updates": 40, "batch_size": 64} | changes
    reports = Recorded()
    learner = BASELINES[name](base, log_phi, BaselineOptions(**options), Streams(0), reports)
    pair = learner.first_twist()
    assert pair.twist is None
    return pair.model, reports["fine-tuning"]


def world():
    """A tiny GPT-Neo of 3 tokens and a potential, 27 sequences, float64."""
    base, _, potential = gpt_neo_world(3, 3)
    return base, ListedPotential(3 * potential.log_phi, 3)


@pytest.mark.parametrize(
    ("name", "student", "rate", "loss"),
    [("dpo", "full", 1e-2, math.log(2)), ("grpo", "lora", 3e-2, 0.0)],
)
def test_the_policy_gains_reward(name, student, rate, loss):
    """And what the loss is at first."""
    base, potential = world()
    policy, figures = train(name, base, potential, learning_rate=rate, student=student)
    with torch.no_grad():
        levels = [Tree(model).prefix_log_q()[-1] for model in (base, policy)]
    before, after = (log_p.exp() @ potential.log_phi for log_p in levels)
    assert after > before + 0.5
    assert len(figures) == 40 and figures[0]["loss"] == pytest.approx(loss, abs=1e-12)


@both
def test_a_hard_potential_is_learned_from_samples_of_the_right_model(name):
    """phi = 1 where token 2 comes first. DPO samples the reference, GRPO the current policy."""
    base, _ = world()
    shares = []

    def log_phi(tokens):
        shares.append((tokens[:, 0] == 2).double().mean())
        return torch.where(tokens[:, 0] == 2, 0.0, -math.inf)

    policy, _ = train(name, base, log_phi)
    with torch.no_grad():
        before, after = (Tree(model).log_p[0][0, 2].exp() for model in (base, policy))
    assert after > before + 0.2
    expected = before if name == "dpo" else after
    assert abs(sum(shares[-10:]) / 10 - expected) < 0.08  # four standard errors of 640 samples


@both
def test_gradient_in_parts_is_that_of_the_whole_batch(name, monkeypatch):
    """22 sequences in parts of 8, the last one smaller; the second update is away from the base.
    Texts end, so that the parts differ in their numbers of tokens."""
    base, potential = world()
    base.end = 2
    gradients, step = [], Student.step

    def watched_step(self):
        gradients.append([parameter.grad.clone() for parameter in self.parameters])
        step(self)

    monkeypatch.setattr(Student, "step", watched_step)
    losses = []
    for rows in (8, 44):
        monkeypatch.setattr(importlib.import_module(f"distill.{name}"), "ROWS", rows)
        options = {"strength": 0.5, "updates": 2, "batch_size": 22}
        losses.append([row["loss"] for row in train(name, base, potential, **options)[1]])
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert max(one.abs().max() for one in gradients[1]) > 1e-3
    torch.testing.assert_close(gradients[:2], gradients[2:], rtol=0, atol=1e-12)


def test_losses_and_the_gradient_of_grpo_equal_the_published_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping, in numpy."""
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
    advantage = ((r - numpy.mean(r)) / numpy.std(r))[:, None]
    x = ref / pi
    log_pi.requires_grad_()
    value = grpo_loss(log_pi, log_ref, advantages(reward), b, torch.ones(8, 5).bool())
    wanted = -numpy.mean(advantage - b * (x - numpy.log(x) - 1))
    assert value.item() == pytest.approx(wanted, rel=1e-12)
    (gradient,) = torch.autograd.grad(value, log_pi)
    wanted = torch.from_numpy(-(advantage + b * (x - 1)) / 40)  # the ratio has been one
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_pairs_join_the_halves_rank_by_rank_and_leave_out_the_middle():
    pairs = preference_pairs(torch.tensor([3.0, -math.inf, 5.0, 1.0, -math.inf]))
    assert pairs.tolist() == [[2, 1], [0, 4]]
    assert preference_pairs(torch.zeros(4)).tolist() == [[0, 2], [1, 3]], "ties keep their order"


def test_advantages_of_equal_and_of_impossible_samples():
    """The mean of 1000 float32 numbers equal to -0.1 is not that number."""
    for equal in ([-0.1] * 1000, [-math.inf] * 9, [-0.35] * 7 + [-0.35000002]):
        assert (advantages(torch.tensor(equal)) == 0).all()
    reward = torch.tensor([-1.0, -math.inf, -3.0, -math.inf, -2.0])
    limit = advantages(reward.clamp(min=-1e9))  # of a falling reward
    torch.testing.assert_close(advantages(reward), limit, rtol=0, atol=1e-6)
    assert advantages(reward)[1] < 0 < advantages(reward)[0]
