"""All learners in enumerated worlds of GPT-Neo; fine-tuning, DPO, GRPO and RL."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from distill.dpo import dpo_loss, preference_pairs
from distill.grpo import advantages, grpo_loss
from networks import tiny
from worlds import generator, gpt_neo_world, log_q, rare_potential, recorded, tiny_conditional

import distill
from distill import RL, BaselineOptions, Paper, PaperOptions, Pooled, PooledOptions, Streams
from distill.finetune import Student
from distill.pair import Pair
from distill.paper import CHECKED, PATIENCE
from distill.pooled.adapter import Adapted, Adapter
from distill.pooled.held_out import HeldOut
from tinystories import Conditional
from tinystories.decoder import counted
from tsmc.exact import Target, kl_divergence
from tsmc.sampler import Population

END = 4  # a third of the texts of sigma end early
BASE = tiny_conditional(0, end=END)
TARGET = Target(BASE, rare_potential)
SIZES = {"particles": 20, "distill_runs": 20, "distill_updates": 30, "distill_learning_rate": 3e-3}
CTL = {"ctl_updates": 12, "ctl_batch_size": 50, "ctl_learning_rate": 1e-3}
POOL = {"pool_first_draws": 200, "pool_first_rounds": 4, "pool_first_ess": 0.5}
POOL |= {"pool_first_updates": 20, "pool_draws": 600, "pool_updates": 50}
POOL |= {"pool_learning_rate": 4e-5, "pool_held_out": 0.2}
PAPER, POOLED = PaperOptions(**SIZES, **CTL), PooledOptions(**POOL)
AT_THE_END = replace(PAPER, resampling="systematic", ess_threshold=0.0)
LINES = {  # the learner, its options, and what KL after lines 1, 3 and 4 may be over p^(0)'s
    "paper": (Paper, PAPER, (0.62, 0.43, 0.31)),
    "resampled at the end": (Paper, AT_THE_END, (0.62, 0.34, 0.26)),
    "LoRA": (Paper, replace(AT_THE_END, student="lora"), (0.62, 0.56, 0.34)),
    "pooled": (Pooled, POOLED, (0.55, 0.38, 0.38)),
}


@pytest.mark.learned
@pytest.mark.parametrize("name", LINES)
def test_every_line_brings_the_proposal_closer_to_sigma(name):
    """KL(sigma||q), its mean over four seeds; the limits are five standard errors or more above it.

    And phi scores as many texts as the learner says.
    """
    kind, options, most = LINES[name]
    scored, found = [], []

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        scored.append(len(tokens))
        return rare_potential(tokens)

    for seed in range(4):
        learner = kind(BASE, log_phi, options, Streams(seed))
        scored.clear()
        first = learner.first_twist()
        assert sum(scored) == learner.scored(0)
        model = learner.distil(first, 1)
        pairs = [first, Pair(model, None), learner.learn_twist(model, 1)]
        assert sum(scored) == learner.scored(1)
        assert kind is Paper or min(recorded(learner, "ladder", "power")) < 1  # it tempers
        found.append([TARGET.kl_to(log_q(pair)) for pair in pairs])
    means = torch.tensor(found).mean(0) / TARGET.kl_to(TARGET.log_p[-1])
    assert (means < torch.tensor(most)).all(), means


@pytest.mark.learned
@pytest.mark.parametrize("student", ["full", "lora"])
@pytest.mark.parametrize("is_alike", [True, False])
def test_distilled_texts_become_likelier_unless_the_runs_held_out_do_not(
    student, is_alike, monkeypatch
):
    """Samples of living runs count alike whatever their Z-hat is; the first run is held out.

    Where its texts are others, they become less likely, and the teacher is returned.
    """
    teacher = tiny_conditional(0, end=1)
    before = copy.deepcopy(teacher.network.state_dict())
    learned = torch.tensor([[3, 4, 5, 6], [3, 1, 1, 1]])  # [K, T]
    held = learned if is_alike else torch.tensor([[2, 2, 2, 2], [6, 1, 1, 1]])
    samples = torch.stack([held, learned, torch.zeros_like(held)])  # [R, K, T]
    log_weights, log_z = torch.zeros(3, 2), torch.tensor([9.0, 0.0, -math.inf])
    particles = (0 * samples, log_weights, log_weights, log_weights)
    population = Population(*particles, samples, log_z, log_z)
    options = PaperOptions(student=student, distill_updates=70, distill_learning_rate=1e-3)
    learner = Paper(teacher, rare_potential, options, Streams(0))
    monkeypatch.setattr(learner, "population", lambda *_: population)
    trained = learner.distil(Pair(teacher, None), 1)
    nats = [-model.log_probs(learned).sum(1).mean() for model in (teacher, trained)]
    losses, checks = (recorded(learner, f"distillation{w}", "loss") for w in ("", ", held out"))
    assert losses[0] == pytest.approx(nats[0].item() / 3.0, rel=0.15)  # tokens of a text: 4 and 2
    assert checks[0] == pytest.approx(-teacher.log_probs(held[:1]).mean().item(), rel=1e-5)
    if is_alike:
        assert len(losses) == 70 and nats[1] < 0.6 * nats[0]
    else:
        assert len(losses) == PATIENCE * CHECKED and len(checks) == PATIENCE + 1
        torch.testing.assert_close(trained.network.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(teacher.network.state_dict(), before, rtol=0, atol=0)


@pytest.mark.learned
def test_without_the_effective_potential_the_target_drifts():
    """log Z-hat is that of p^(1) phi, not of p^(0) phi."""
    model = tiny_conditional(1, end=END)
    options = replace(AT_THE_END, effective_potential=False)
    learner = Paper(BASE, rare_potential, options, Streams(0, rows=4000))
    found = learner.population(Pair(model, None), "x", 1, 4000, 1).log_mean_z()
    drifted = Target(model, rare_potential).log_z
    assert abs(found - drifted) < 0.25 * abs(drifted - TARGET.log_z)


def test_the_ladder_draws_from_what_it_has_fitted(monkeypatch):
    proposals, draw = [], Pooled.draw

    def recording(learner: Pooled, q: Conditional, *rest: object) -> None:
        proposals.append(q)
        draw(learner, q, *rest)

    monkeypatch.setattr(Pooled, "draw", recording)
    Pooled(BASE, rare_potential, POOLED, Streams(0)).first_twist()
    assert proposals[0] is BASE and len(set(proposals)) == len(proposals) == 4


@pytest.mark.learned
def test_with_hints_the_ladder_finds_what_p0_does_not():
    """phi = 1 where a 2 follows a 5, which 1 of 137 texts has."""

    def log_phi(tokens: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        is_met = (tokens[:, :-1] == 5) & (tokens[:, 1:] == 2)
        return torch.where(is_met.any(1), 0.0, -math.inf)

    nothing = lambda tokens: torch.full((len(tokens),), -math.inf)  # noqa: E731
    with pytest.raises(ValueError, match=r"^none of the 50 texts .* has phi > 0; .*give it hints"):
        Pooled(BASE, nothing, POOLED, Streams(0)).first_twist()
    log_phi.hints = [[(5, 2)]]
    pair = Pooled(BASE, log_phi, POOLED, Streams(0)).first_twist()
    target = Target(BASE, log_phi)
    assert target.kl_to(log_q(pair)) < 0.5 * target.kl_to(target.log_p[-1])


@pytest.mark.learned
def test_texts_held_out_tell_when_a_fit_learns_the_heavy_ones_by_heart(monkeypatch):
    """Of 400 texts of p^(0), few have nearly all the weight. At a step size ten times too large the
    adapter that is kept is closer to sigma than that of step 100, where the fit would have ended.
    """
    last, kept, check = [], [], HeldOut.is_over

    def go_on(held: HeldOut, adapter: Adapter, step: int, steps: int) -> bool:
        check(held, adapter, step, steps)
        if step == steps:
            last.append(TARGET.kl_to(log_q(Pair(Adapted(BASE, adapter), None))))
        return False

    options = replace(POOLED, surrogate=False, pool_updates=100, pool_learning_rate=4e-4)
    for seed in range(4):
        learner = Pooled(BASE, rare_potential, options, Streams(seed))
        learner.draw(BASE, "sampling", 0, 400)
        with monkeypatch.context() as patch:
            patch.setattr(HeldOut, "is_over", go_on)
            kept.append(TARGET.kl_to(log_q(Pair(learner.fit_to_sigma(0), None))))
    assert sum(kept) < 0.85 * sum(last)
    assert sum(kept) < 0.6 * len(kept) * TARGET.kl_to(TARGET.log_p[-1])
    learner = Pooled(BASE, rare_potential, replace(options, pool_updates=200), Streams(0))
    learner.draw(BASE, "sampling", 0, 400)
    learner.fit_to_sigma(0)
    assert len(recorded(learner, "distillation", "loss")) < 200


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
    finished = student.finish(1)
    torch.testing.assert_close(finished(ids).logits, expected)
    assert finished.state_dict().keys() == network.state_dict().keys()
    assert torch.equal(network(ids).logits, before)


POLICIES = [(distill.DPO, "full", 1e-2, math.log(2)), (distill.GRPO, "lora", 3e-2, 0.0)]


@pytest.mark.learned
@pytest.mark.parametrize(("kind", "student", "rate", "loss"), POLICIES)
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
    assert pair.twist is None and len(torch.cat(rewards)) == learner.scored(0)
    policies = (Pair(base, None), pair)
    before, after = (3 * log_q(policy).exp() @ potential.log_phi for policy in policies)
    assert after > before + 1
    sampled = before if kind is distill.DPO else after
    assert abs(torch.cat(rewards[-10:]).mean() - sampled) < 0.5
    losses = recorded(learner, "fine-tuning", "loss")
    assert len(losses) == 40 and losses[0] == pytest.approx(loss, abs=1e-12)


@pytest.mark.learned
def test_rl_approaches_sigma_and_its_objective_log_z():
    base, _, potential = gpt_neo_world(3, 3)
    target = Target(base, potential)
    learner = RL(base, potential, distill.RLOptions(learning_rate=1e-2, updates=60), Streams(0))
    log_pi, log_sigma = log_q(learner.first_twist()), target.log_sigma[-1]
    kl = kl_divergence(log_pi, log_sigma)
    assert kl < 0.2 * kl_divergence(target.log_p[-1], log_sigma)
    objective = sum(recorded(learner, "fine-tuning", "objective")[-10:]) / 10
    assert objective == pytest.approx(target.log_z - kl.item(), abs=0.1)


def test_losses_and_the_gradient_of_grpo_equal_the_published_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping.

    Texts count alike, whether they have 2 tokens up to their end or 5.
    """
    source, b = generator(1), 0.2
    log_pi, log_ref = -3 * torch.rand(2, 8, 5, dtype=torch.float64, generator=source)
    reward = torch.randn(8, dtype=torch.float64, generator=source)
    ratio = log_pi.exp() / log_ref.exp()
    better, worse = ratio.prod(1)[reward.argsort(descending=True)].view(2, 4)
    pairs = preference_pairs(reward)
    value = dpo_loss(log_pi.sum(-1)[pairs], log_ref.sum(-1)[pairs], b)
    torch.testing.assert_close(value, -(1 / (1 + (worse / better) ** b)).log().mean())
    is_counted = counted(torch.tensor([[0, 1, 1, 1, 1]] * 3 + [[0, 0, 0, 0, 0]] * 5), 1)
    share = is_counted.double() / is_counted.sum(1, keepdim=True) / 8  # of each token
    advantage = ((reward - reward.mean()) / reward.std(correction=0))[:, None]
    log_pi.requires_grad_()
    value = grpo_loss(log_pi, log_ref, advantages(reward), b, is_counted)
    wanted = -(share * (advantage - b * (1 / ratio + ratio.log() - 1))).sum()
    torch.testing.assert_close(value, wanted)
    (gradient,) = torch.autograd.grad(value, log_pi)
    wanted = -share * (advantage + b * (1 / ratio - 1))  # pi / sg(pi) is one
    torch.testing.assert_close(gradient, wanted)


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


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("kind", distill.LEARNERS.values())
def test_what_is_no_number_below_infinity_is_no_reward(kind, wrong):
    """NaN would be preferred to everything by DPO and be phi = 0 for GRPO."""

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        return torch.tensor([wrong] + [0.0] * (len(tokens) - 1))

    learner = kind(tiny_conditional(0), log_phi, kind.Options(), Streams(0))
    with pytest.raises(ValueError, match="log phi is NaN or infinite on some text"):
        learner.first_twist()
