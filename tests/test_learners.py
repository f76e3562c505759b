"""The paper's learner in enumerated worlds of GPT-Neo; fine-tuning, DPO and GRPO."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from networks import tiny
from torch import nn
from worlds import INF, generator, gpt_neo_world, log_q, rare_potential, tiny_conditional

from distill.finetune import Best, Student
from distill.pair import Pair
from distill.paper import CHECKED, PATIENCE, Paper
from distill.policy import DPO, GRPO, advantages, dpo_loss, grpo_loss, preference_pairs
from eval.options import Options
from tsmc.exact import Target
from tsmc.sampler import Population
from tsmc.sigma import Sigma
from tsmc.streams import Streams
from twist.ctl import draw_batch

BASE = tiny_conditional(0, (4,))  # a third of the texts of sigma end early
TARGET = Target(BASE, rare_potential)
SIZES = {"particles": 20, "distill_runs": 20, "distill_updates": 30, "distill_learning_rate": 3e-3}
SIZES |= {"ctl_updates": 12, "ctl_batch_size": 50, "ctl_learning_rate": 1e-3}
ALWAYS = Options(**SIZES, ess_threshold=1.0)
LORA = Options(**SIZES, resampling="systematic", student="lora")
LINES = {  # options, and what KL after lines 1, 3 and 4 may be over that of p^(0)
    "resampled at every step": (ALWAYS, (0.62, 0.85, 0.43)),
    "resampled at the end, LoRA": (LORA, (0.62, 0.56, 0.44)),
}


@pytest.mark.learned
@pytest.mark.parametrize("name", LINES)
def test_every_line_brings_the_proposal_closer_to_sigma(name):
    """KL(sigma||q), its mean over two seeds; the limits are five standard errors above it. And phi
    scores as many texts as the learner says."""
    options, most = LINES[name]
    scored, found = [], []

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        scored.append(len(tokens))
        return rare_potential(tokens)

    for seed in range(2):
        learner = Paper(BASE, log_phi, options, Streams(seed))
        scored.clear()
        first = learner.learn_twist(BASE, 0)
        assert sum(scored) == learner.scored(0)
        model = learner.distil(first, 1)
        pairs = [first, Pair(model, None), learner.learn_twist(model, 1)]
        assert sum(scored) == learner.scored(1)
        found.append([TARGET.kl_to(log_q(pair)) for pair in pairs])
    means = torch.tensor(found).mean(0) / TARGET.kl_to(TARGET.log_p[-1])
    assert (means < torch.tensor(most)).all(), means


@pytest.mark.learned
@pytest.mark.parametrize(("student", "is_alike"), [("full", True), ("full", False), ("lora", True)])
def test_distilled_texts_become_likelier_unless_the_runs_held_out_do_not(
    student, is_alike, monkeypatch
):
    """Samples of living runs count alike whatever their Z-hat is; the first run is held out.

    Where its texts are others, they become less likely, and the teacher is returned.
    """
    teacher = tiny_conditional(0, (1,))
    before = copy.deepcopy(teacher.network.state_dict())
    learned = torch.tensor([[3, 4, 5, 6], [3, 1, 1, 1]])  # [K, T]
    held = learned if is_alike else torch.tensor([[2, 2, 2, 2], [6, 1, 1, 1]])
    samples = torch.stack([held, learned, torch.zeros_like(held)])  # [R, K, T]
    log_z = torch.tensor([9.0, 0.0, -INF])
    population = Population(0 * samples, *torch.zeros(2, 3, 2), samples, log_z, log_z)
    options = Options(student=student, distill_updates=70, distill_learning_rate=1e-3)
    learner = Paper(teacher, rare_potential, options, Streams(0))
    monkeypatch.setattr(learner, "population", lambda *_: population)
    trained = learner.distil(Pair(teacher, None), 1)
    nats = [-model.log_probs(learned).mean().item() for model in (teacher, trained)]
    losses = learner.figures["distillation_loss"]
    assert losses[0] == pytest.approx(nats[0], rel=0.2)  # of a token, by the 32 rows drawn
    if is_alike:
        assert len(losses) == 70 and nats[1] < 0.6 * nats[0]
    else:
        assert len(losses) == PATIENCE * CHECKED
        torch.testing.assert_close(trained.network.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(teacher.network.state_dict(), before, rtol=0, atol=0)


def test_the_best_values_are_kept_and_a_fit_ends_when_it_is_past_them():
    network = nn.Linear(1, 1, bias=False)
    best = Best(network, patience=2)
    for loss, is_over in ((3.0, False), (1.0, False), (2.0, False), (1.0, True)):
        network.weight.data.fill_(loss + len(best.losses))
        assert best.is_over(loss) == is_over
    best.restore()
    assert network.weight.item() == 2.0


@pytest.mark.learned
def test_without_the_effective_potential_the_target_drifts():
    """log Z-hat is that of p^(1) phi, not of p^(0) phi."""
    model = tiny_conditional(1, (4,))
    options = replace(LORA, effective_potential=False)
    learner = Paper(BASE, rare_potential, options, Streams(0))
    found = learner.population(Pair(model, None), "x", 1, 1000, 4).log_z.logsumexp(0) - math.log(4)
    drifted = Target(model, rare_potential).log_z
    assert abs(found - drifted) < 0.25 * abs(drifted - TARGET.log_z)


LAYERS = {"gpt_neo": ["q_proj"] * 2 + ["v_proj"] * 2, "gpt2": ["c_attn"] * 2}
LAYERS["gpt_neox"] = ["query_key_value"] * 2


@pytest.mark.parametrize("kind", LAYERS)
def test_lora_starts_at_the_base_model_to_the_bit_and_what_it_trains_is_what_is_kept(kind):
    """In networks of transformers that make queries, keys and values apart or by one layer."""
    sizes = {"attention_types": [[["global"], 2]]} if kind == "gpt_neo" else {"pad_token_id": 0}
    network, ids = tiny(kind, **sizes), torch.arange(27).view(3, 9) % 3
    before = network(ids).logits
    student = Student(network, 1e-2, True, generator(0))
    assert torch.equal(student.network(ids).logits, before)
    names = {layer: name.rpartition(".")[2] for name, layer in student.network.named_modules()}
    assert sorted(names[layer] for layer in student.lora) == LAYERS[kind]
    for _ in range(3):
        student.network(ids).logits.square().sum().backward()
        student.step()
    expected = student.network(ids).logits
    assert (expected - before).abs().max() > 0.01
    finished = student.finish()
    torch.testing.assert_close(finished(ids).logits, expected)
    assert finished.state_dict().keys() == network.state_dict().keys()
    assert torch.equal(network(ids).logits, before)
    with pytest.raises(ValueError, match="no query or value projection"):
        Student(nn.Linear(2, 2), 1e-2, True, generator(0))


POLICIES = [(DPO, "full", 1e-2, math.log(2)), (GRPO, "lora", 3e-2, 0.0)]


@pytest.mark.learned
@pytest.mark.parametrize(("kind", "student", "rate", "loss"), POLICIES)
def test_the_policy_gains_reward_by_samples_of_the_right_model(kind, student, rate, loss):
    """DPO samples the reference, GRPO the current policy. What the loss is at first is known."""
    base, _, potential = gpt_neo_world(3, 3)  # 27 sequences, float64
    rewards = []

    def log_phi(tokens):
        rewards.append(3 * potential(tokens))
        return rewards[-1]

    sizes = {"student": student, "learning_rate": rate, "updates": 40, "batch_size": 64}
    learner = kind(base, log_phi, Options(**sizes, strength=0.1), Streams(0))
    pair = learner.learn_twist(base, 0)
    assert pair.twist is None and len(torch.cat(rewards)) == learner.scored(0)
    policies = (Pair(base, None), pair)
    before, after = (3 * log_q(policy).exp() @ potential.log_phi for policy in policies)
    assert after > before + 1
    sampled = before if kind is DPO else after
    assert abs(torch.cat(rewards[-10:]).mean() - sampled) < 0.5
    batch = draw_batch(Sigma(base, base, log_phi), None, 64, generator(0))
    assert sum(learner.losses(base, batch)).item() == pytest.approx(loss, abs=1e-12)


def test_losses_and_the_gradient_of_grpo_equal_the_published_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping."""
    source, b = generator(1), 0.2
    log_pi, log_ref = -3 * torch.rand(2, 8, 5, dtype=torch.float64, generator=source)
    reward = torch.randn(8, dtype=torch.float64, generator=source)
    ratio = log_pi.exp() / log_ref.exp()
    better, worse = ratio.prod(1)[reward.argsort(descending=True)].view(2, 4)
    pairs = preference_pairs(reward)
    value = dpo_loss(log_pi.sum(-1)[pairs], log_ref.sum(-1)[pairs], b)
    torch.testing.assert_close(value, -(1 / (1 + (worse / better) ** b)).log().mean())
    advantage = ((reward - reward.mean()) / reward.std(correction=0))[:, None]
    log_pi.requires_grad_()
    value = grpo_loss(log_pi, log_ref, advantages(reward), b)
    wanted = -(advantage - b * (1 / ratio + ratio.log() - 1)).mean()
    torch.testing.assert_close(value, wanted)
    (gradient,) = torch.autograd.grad(value, log_pi)
    wanted = -(advantage + b * (1 / ratio - 1)) / 40  # pi / sg(pi) is one
    torch.testing.assert_close(gradient, wanted)


def test_pairs_and_advantages_of_equal_and_of_impossible_samples():
    """The mean of 1000 float32 numbers equal to -0.1 is not that number."""
    pairs = preference_pairs(torch.tensor([3.0, -INF, 5.0, 1.0, -INF]))
    assert pairs.tolist() == [[2, 1], [0, 4]], "the middle is left out, ties keep their order"
    for equal in ([-0.1] * 1000, [-INF] * 9, [-0.35] * 7 + [-0.35000002]):
        assert (advantages(torch.tensor(equal)) == 0).all()
    reward = torch.tensor([-1.0, -INF, -3.0, -INF, -2.0])
    limit = advantages(reward.clamp(min=-1e9))  # of a falling reward
    torch.testing.assert_close(advantages(reward), limit, rtol=0, atol=1e-6)
    assert advantages(reward)[1] < 0 < advantages(reward)[0]
