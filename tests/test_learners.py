"""The paper's learner in enumerated worlds: CTL, line 3, LoRA; DPO and GRPO."""

import copy
import math

import pytest
import torch
import worlds
from networks import tiny
from tables import TableModel, TableTwist
from worlds import (
    INF,
    exact_ctl_loss,
    generator,
    log_q,
    rare_potential,
    table_world,
    tiny_conditional,
)

import distill.paper
from distill.finetune import Student
from distill.pair import Pair
from distill.paper import CHECKED, PATIENCE, Paper
from distill.policy import DPO, GRPO, advantages, dpo_loss, grpo_loss, preference_pairs
from eval.options import Options
from tests.exact import Target, kl_divergence
from tsmc.proposal import sequence_log_probs
from tsmc.sampler import Population
from tsmc.sigma import Sigma
from tsmc.streams import Streams
from twist.ctl import ctl_loss, draw_batch
from twist.mlp import TwistMLP


def gradient(sigma, twist, batch_size, source) -> torch.Tensor:
    """That of CTL by one batch, shaped like the table of the twist."""
    loss = ctl_loss(twist, draw_batch(sigma, twist, batch_size, source))
    return torch.autograd.grad(loss, twist.log_psi)[0]


@pytest.mark.learned
@pytest.mark.parametrize("end", [(), (1,)], ids=["", "texts end"])
@pytest.mark.parametrize("m", [0, 1])
def test_mean_gradient_of_many_batches_is_the_enumerated_one(m, end):
    base, twist, potential = table_world(3, 3, seed=1, scale=0.8, end=end)
    model = TableModel(TableModel.random(3, 3, generator(9)).table, 3, end) if m > 0 else base
    sigma, source = Sigma(model, base, potential), generator(2)

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:  # phi^(m), 0 where p^(m) is
        log_p = sequence_log_probs(model, tokens)
        return torch.where(log_p > -INF, sigma.log_potential(tokens, log_p), -INF)

    target = Target(model, log_phi)
    wanted = Target(base, potential).log_sigma[-1]  # the target stays while p changes (eq. 8)
    torch.testing.assert_close(target.log_sigma[-1], wanted)
    gradients = torch.stack([gradient(sigma, twist, 2000, source) for _ in range(40)])
    (exact,) = torch.autograd.grad(exact_ctl_loss(target, twist), twist.log_psi)
    never = exact == 0  # prefixes that no text has
    assert (gradients[:, never] == 0).all() and never.any() == bool(end)
    mean, error = gradients.mean(0)[~never], gradients.std(0)[~never] / 40**0.5
    assert ((mean - exact[~never]) / error).abs().max() < 5  # of at most 39 components
    assert (mean / error).abs().max() > 20  # they can tell the gradient from none
    # At the optimal twist all weights are equal: positives and negatives cancel one by one.
    optimal = TableTwist.optimal(target)
    assert gradient(sigma, optimal, 64, generator(0)).abs().max() < 1e-12
    tokens, drifting = target.tree.sequences, Sigma(model, base, potential, is_effective=False)
    assert torch.equal(drifting.log_potential(tokens, INF), potential(tokens))


def test_the_step_size_falls_and_a_batch_without_positive_weight_teaches_nothing(monkeypatch):
    """A step of Adam is its step size where every gradient is one. The twist is a table here."""
    model, twist, potential = table_world(2, 3)
    monkeypatch.setattr(distill.paper, "TwistMLP", lambda *_: twist.requires_grad_(True))
    before = twist.log_psi.detach().clone()
    options = Options(ctl_updates=5, ctl_batch_size=50, ctl_learning_rate=0.1)
    Paper(model, worlds.hard_potential({}), options, Streams(0)).learn_twist(model, 1)
    assert torch.equal(twist.log_psi, before)
    learner = Paper(model, potential, options, Streams(0))
    learner.twist_loss = lambda psi, batch, model: psi.log_psi.sum()
    learner.learn_twist(model, 1)
    wanted = torch.full_like(before, 0.1 * (1 + 0.82 + 0.64 + 0.46 + 0.28))
    torch.testing.assert_close(before - twist.log_psi, wanted)


def test_a_fresh_twist_is_one_everywhere_and_chosen_tokens_equal_the_full_output():
    hidden, twist = torch.randn(7, 8, generator=generator(1)), TwistMLP(8, 7, generator(0))
    assert torch.equal(twist(hidden), torch.zeros(7, 7))
    for parameter in twist.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator(4))
    torch.testing.assert_close(twist.of_tokens(hidden, torch.arange(7)), twist(hidden).diagonal())


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
    """KL(sigma||q), its mean over two seeds; the limits are five standard errors above it."""
    options, most = LINES[name]
    found = []
    for seed in range(2):
        learner = Paper(BASE, rare_potential, options, Streams(seed))
        first = learner.learn_twist(BASE, 0)
        model = learner.distil(first, 1)
        pairs = [first, Pair(model, None), learner.learn_twist(model, 1)]
        found.append([kl_divergence(TARGET.log_sigma[-1], log_q(pair)) for pair in pairs])
    means = torch.tensor(found).mean(0) / kl_divergence(TARGET.log_sigma[-1], TARGET.log_p[-1])
    assert (means < torch.tensor(most)).all(), means


@pytest.mark.learned
@pytest.mark.parametrize(("student", "is_alike"), [("full", True), ("full", False), ("lora", True)])
def test_distilled_texts_become_likelier_unless_the_runs_held_out_do_not(
    student, is_alike, monkeypatch
):
    """Samples of living runs count alike; the first is held out. Where its texts are others, they
    become less likely, and the teacher is returned."""
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


LAYERS = {"gpt_neo": "q_proj q_proj v_proj v_proj", "gpt2": "c_attn c_attn"}
LAYERS["gpt_neox"] = "query_key_value query_key_value"


@pytest.mark.parametrize("kind", LAYERS)
def test_lora_starts_at_the_base_model_to_the_bit_and_what_it_trains_is_what_is_kept(kind):
    """In networks of transformers that make queries, keys and values apart or by one layer."""
    sizes = {"attention_types": [[["global"], 2]]} if kind == "gpt_neo" else {"pad_token_id": 0}
    network, ids = tiny(kind, **sizes), torch.arange(27).view(3, 9) % 3
    before, student = network(ids).logits, Student(network, 1e-2, True, generator(0))
    assert torch.equal(student.network(ids).logits, before)
    names = {layer: name.rpartition(".")[2] for name, layer in student.network.named_modules()}
    assert sorted(names[layer] for layer in student.lora) == LAYERS[kind].split()
    for _ in range(3):
        student.network(ids).logits.square().sum().backward()
        student.step()
    expected, finished = student.network(ids).logits, student.finish()
    assert (expected - before).abs().max() > 0.01
    torch.testing.assert_close(finished(ids).logits, expected)
    assert finished.state_dict().keys() == network.state_dict().keys()
    assert torch.equal(network(ids).logits, before)


POLICIES = [(DPO, "full", 1e-2, math.log(2)), (GRPO, "lora", 3e-2, 0.0)]


@pytest.mark.learned
@pytest.mark.parametrize(("kind", "student", "rate", "loss"), POLICIES)
def test_the_policy_gains_reward_by_samples_of_the_right_model(kind, student, rate, loss):
    """DPO samples the reference, GRPO the current policy. What the loss is at first is known."""
    base, _, potential = worlds.gpt_neo_world(3, 3)  # 27 sequences, float64
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
    drawn = torch.cat(rewards[-10:]).mean()
    assert abs(drawn - (before if kind is DPO else after)) < 0.5
    batch = draw_batch(Sigma(base, base, log_phi), None, 64, generator(0))
    assert learner.loss(base, batch).item() == pytest.approx(loss, abs=1e-12)


def test_losses_and_the_gradient_of_grpo_equal_the_published_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping; and what is no reward."""
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
    pairs = preference_pairs(torch.tensor([3.0, -INF, 5.0, 1.0, -INF]))
    assert pairs.tolist() == [[2, 1], [0, 4]], "the middle is left out, ties keep their order"
    for equal in ([-0.1] * 1000, [-INF] * 9):  # whose mean in float32 is not -0.1
        assert (advantages(torch.tensor(equal)) == 0).all()
    reward = torch.tensor([-1.0, -INF, -3.0, -INF, -2.0])
    limit = advantages(reward.clamp(min=-1e9))  # of a falling reward
    torch.testing.assert_close(advantages(reward), limit, rtol=0, atol=1e-6)
