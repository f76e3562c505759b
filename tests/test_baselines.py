"""DPO and GRPO: whole runs in a world that can be enumerated, losses, guards."""

import copy
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
students = pytest.mark.parametrize("student", ["full", "lora"])


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


@students
@both
def test_the_policy_gains_reward_and_the_base_stays(name, student):
    base, potential = world()
    before = copy.deepcopy(base.network.state_dict())
    rate = 3e-2 if student == "lora" else 1e-2
    policy, figures = train(name, base, potential, learning_rate=rate, student=student)
    with torch.no_grad():
        levels = [Tree(model).prefix_log_q()[-1] for model in (base, policy)]
    gain = [log_p.exp() @ potential.log_phi for log_p in levels]
    assert gain[1] > gain[0] + 0.5
    assert all(torch.equal(x, before[key]) for key, x in base.network.state_dict().items())
    after = policy.network.state_dict()
    assert after.keys() == before.keys(), "LoRA is merged"
    changed = {key.split(".")[-2] for key in after if (after[key] != before[key]).any()}
    assert changed == {"q_proj", "v_proj"} or student == "full"
    assert len(changed) > 6 or student == "lora"
    assert len(figures) == 40
    first = math.log(2) if name == "dpo" else 0
    assert figures[0]["loss"] == pytest.approx(first, abs=1e-12)


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


@students
@both
def test_gradient_in_parts_is_that_of_the_whole_batch(name, student, monkeypatch):
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
        options = {"strength": 0.5, "updates": 2, "batch_size": 22, "student": student}
        losses.append([row["loss"] for row in train(name, base, potential, **options)[1]])
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert len(gradients[0]) >= 8 and max(one.abs().max() for one in gradients[1]) > 1e-3
    torch.testing.assert_close(gradients[:2], gradients[2:], rtol=0, atol=1e-12)


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


def test_the_gradient_of_grpo_has_the_advantage_that_the_loss_has_not():
    """In the loss the ratio is one; its gradient is -(A + b (x - 1)) for each token."""
    log_pi, log_ref, reward = random_samples(8, 5)
    loss = grpo_loss(log_pi, log_ref, advantages(reward), 0.2, torch.ones(8, 5).bool())
    (found,) = torch.autograd.grad(loss, log_pi)
    x = (log_ref - log_pi.detach()).exp()
    standard = (reward - reward.mean()) / reward.std(correction=0)
    expected = -(standard[:, None] + 0.2 * (x - 1)) / 40
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_pairs_join_the_halves_rank_by_rank_and_leave_out_the_middle():
    pairs = preference_pairs(torch.tensor([3.0, -math.inf, 5.0, 1.0, -math.inf]))
    assert pairs.tolist() == [[2, 1], [0, 4]]
    assert preference_pairs(torch.zeros(4)).tolist() == [[0, 2], [1, 3]], "ties keep their order"


EQUAL = [[-0.1] * 1000, [-math.inf] * 9, [-0.35] * 7 + [-0.35000002]]


@pytest.mark.parametrize("rewards", EQUAL)
def test_rewards_that_are_equal_up_to_rounding_give_no_advantage(rewards):
    """The mean of 1000 float32 numbers equal to -0.1 is not that number."""
    assert (advantages(torch.tensor(rewards)) == 0).all()


def test_an_impossible_sample_counts_as_the_limit_of_a_falling_reward():
    reward = torch.tensor([-1.0, -math.inf, -3.0, -math.inf, -2.0])
    limit = advantages(reward.clamp(min=-1e9))
    torch.testing.assert_close(advantages(reward), limit, rtol=0, atol=1e-6)
    assert advantages(reward)[1] < 0 < advantages(reward)[0]
