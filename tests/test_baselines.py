"""DPO and GRPO: whole runs in a world that can be enumerated, losses, guards, scores."""

import copy
import importlib
import math

import numpy
import pytest
import torch
from worlds import ListedPotential, Recorded, generator, gpt_neo_world, tiny_conditional

from distill.dpo import dpo, dpo_loss, preference_pairs
from distill.finetune import BaselineConfig, Student
from distill.grpo import advantages, grpo, grpo_loss
from eval.baseline import FIRST, METHODS, baseline_config
from tinystories.errors import InputError
from tsmc.exact import Tree

BASELINES = {"dpo": dpo, "grpo": grpo}
both = pytest.mark.parametrize("name", BASELINES)
with_and_without_lora = pytest.mark.parametrize("lora", [False, True])


def config(strength=0.1, learning_rate=1e-2, updates=40, batch_size=64) -> BaselineConfig:
    return BaselineConfig(learning_rate, 1e-2, strength, updates, batch_size)


def train(name, base, log_phi, options, lora=False):
    reports = Recorded()
    return BASELINES[name](base, log_phi, options, lora, generator(0), reports), reports


def world():
    """A tiny GPT-Neo of 3 tokens and a potential, 27 sequences, float64."""
    base, _, potential = gpt_neo_world(3, 3)
    return base, ListedPotential(3 * potential.log_phi, 3)


@with_and_without_lora
@both
def test_the_policy_gains_reward_and_the_base_stays(name, lora):
    base, potential = world()
    before = copy.deepcopy(base.network.state_dict())
    options = config(learning_rate=3e-2 if lora else 1e-2)
    policy, figures = train(name, base, potential, options, lora)
    with torch.no_grad():
        levels = [Tree(model).prefix_log_q()[-1] for model in (base, policy)]
    gain = [log_p.exp() @ potential.log_phi for log_p in levels]
    assert gain[1] > gain[0] + 0.5
    assert all(torch.equal(x, before[key]) for key, x in base.network.state_dict().items())
    after = policy.network.state_dict()
    assert after.keys() == before.keys(), "LoRA is merged"
    changed = {key.split(".", 2)[-1] for key in after if (after[key] != before[key]).any()}
    assert changed == {"attn.q_proj.weight", "attn.v_proj.weight"} if lora else len(changed) > 10
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

    policy, _ = train(name, base, log_phi, config())
    with torch.no_grad():
        before, after = (Tree(model).log_p[0][0, 2].exp() for model in (base, policy))
    assert after > before + 0.2
    expected = before if name == "dpo" else after
    assert abs(sum(shares[-10:]) / 10 - expected) < 0.08  # four standard errors of 640 samples


@with_and_without_lora
@both
def test_gradient_in_parts_is_that_of_the_whole_batch(name, lora, monkeypatch):
    """22 sequences in parts of 8, the last one smaller; the second update is away from the base."""
    base, potential = world()
    monkeypatch.setattr(Student, "finish", lambda self: self.network)  # LoRA is not merged
    results = []
    for rows in (8, 44):
        monkeypatch.setattr(importlib.import_module(f"distill.{name}"), "ROWS", rows)
        options = config(0.5, updates=2, batch_size=22)
        policy, figures = train(name, base, potential, options, lora)
        trained = [p for p in policy.network.parameters() if p.requires_grad]
        losses = torch.tensor([row["loss"] for row in figures]).double()
        results.append([losses, *(parameter.grad for parameter in trained)])
    assert len(results[0]) > 4
    assert max(gradient.abs().max() for gradient in results[0][1:]) > 1e-3
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@both
def test_a_reward_that_is_not_finite_stops_the_run(name, bad):
    values = iter((-1.0, bad))
    with pytest.raises(InputError, match=r"^log phi is NaN or \+inf on a sample"):
        train(name, world()[0], lambda tokens: torch.full((len(tokens),), next(values)), config())


@with_and_without_lora
def test_a_model_that_is_not_finite_is_not_returned(lora):
    student = Student(tiny_conditional(0).network, 1e-2, 0.0, lora, generator(0))
    student.parameters[1].data[0] = torch.nan
    with pytest.raises(InputError, match=r"not finite; lower the learning rate$"):
        student.finish()


@pytest.mark.parametrize("method", METHODS)
def test_baselines_score_as_many_texts_as_algorithm_1(method):
    for setting in FIRST:
        options = baseline_config(method, setting, 30_000, 128)
        assert options.updates * options.batch_size == 30_000 // 128 * 128
        assert options.learning_rate > 0 and options.strength > 0


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
    pairs = preference_pairs(torch.tensor([3.0, -math.inf, 5.0, 1.0, -math.inf]))
    assert pairs.tolist() == [[2, 1], [0, 4]]
    assert preference_pairs(torch.zeros(4)).tolist() == [[0, 2], [1, 3]], "ties keep their order"


@pytest.mark.parametrize("value", [-0.1, 0.0, -34.7, -math.inf])
def test_equal_rewards_give_no_advantage(value):
    """The mean of 1000 float32 numbers equal to -0.1 is not that number."""
    assert (advantages(torch.full((1000,), value)) == 0).all()


def test_an_impossible_sample_counts_as_the_limit_of_a_falling_reward():
    reward = torch.tensor([-1.0, -math.inf, -3.0, -math.inf, -2.0])
    limit = advantages(reward.clamp(min=-1e9))
    torch.testing.assert_close(advantages(reward), limit, rtol=0, atol=1e-6)
    assert advantages(reward)[1] < 0 < advantages(reward)[0]
