"""DPO and GRPO: values, gradients, guards, costs, and what a few updates do to a world that can be enumerated."""

import copy
import dataclasses
import importlib
import math

import numpy
import pytest
import torch
from test_twist import tiny
from worlds import ListedPotential, generator, gpt_neo_world

from distill import DPO_GRID, GRPO_GRID, BaselineConfig, Cost, dpo, dpo_cost, grpo, grpo_cost
from distill.dpo import dpo_loss, dpo_step, preference_pairs
from distill.finetune import Student, rewards
from distill.grpo import advantages, grpo_loss, grpo_step
from distill.lora import LoRALinear
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo
from tinystories.phase import Phase
from tsmc.exact import Tree, kl_divergence
from tsmc.proposal import sample_proposal
from tsmc.table import TableModel, prefix_numbers

BASELINES = {"dpo": dpo, "grpo": grpo}
COSTS = {"dpo": dpo_cost, "grpo": grpo_cost}
INFINITY = math.inf


class Recorded(Phase):
    """Keeps what a loop reports."""

    def __init__(self):
        self.figures = []

    def report(self, **figures):
        self.figures.append(figures)


def config(strength=0.1, learning_rate=1e-2, updates=40, batch_size=64) -> BaselineConfig:
    return BaselineConfig(learning_rate, 1e-2, strength, updates, batch_size)


def train(name, base, log_phi, options, lora=False, seed=0):
    """The trained model and everything that was reported."""
    phase = Recorded()
    return BASELINES[name](base, log_phi, options, lora, generator(seed), phase), phase.figures


def world(seed=0):
    """A tiny GPT-Neo of 3 tokens and a potential, 27 sequences, float64."""
    base, _, potential = gpt_neo_world(3, 3, seed)
    return base, ListedPotential(3 * potential.log_phi, 3)


def random_log_probs(*shape, seed=0):
    """Made-up log-probs of a policy, with gradient, and of a reference, float64."""
    log_pi, log_ref = -torch.rand(2, *shape, dtype=torch.float64, generator=generator(seed)).mul(3)
    return log_pi.requires_grad_(), log_ref


# the formulas


def test_dpo_loss_is_log_2_at_the_reference_and_pushes_the_pair_apart():
    log_pi, _ = random_log_probs(5, 2)
    loss = dpo_loss(log_pi, log_pi.detach(), 0.4)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-15)
    torch.testing.assert_close(log_pi.grad, torch.tensor([[-0.04, 0.04]] * 5, dtype=torch.float64))


def test_grpo_loss_is_0_at_the_reference_and_its_gradient_is_not():
    log_pi, _ = random_log_probs(6, 4)
    advantage = advantages(torch.arange(6.0))
    loss = grpo_loss(log_pi, log_pi.detach(), advantage, 0.3)
    loss.backward()
    assert abs(loss.item()) < 1e-15
    torch.testing.assert_close(log_pi.grad, -advantage[:, None].expand(6, 4) / 24)
    assert log_pi.grad.abs().min() > 0.01


def test_losses_equal_the_public_formulas():
    """Rafailov et al. eq. 7 and Shao et al. eq. 3 and 4 without clipping, sample by sample in numpy."""
    log_pi, log_ref = random_log_probs(8, 5, seed=1)
    reward, b = torch.randn(8, dtype=torch.float64, generator=generator(2)), 0.2
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


def policy_gradient(model: TableModel, tokens: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Sum over n and t of coefficients [N, T] times the gradient of log pi(s_t | ...): one-hot minus probabilities."""
    gradient = torch.zeros_like(model.table)
    for n, numbers in enumerate(prefix_numbers(tokens, model.table.shape[1])):
        for t, row in enumerate(numbers):
            gradient[row] -= coefficients[n, t] * model.table[row].detach().softmax(-1)
            gradient[row, tokens[n, t]] += coefficients[n, t]
    return gradient


def test_gradients_have_their_closed_forms_in_a_table_world():
    base, policy = (TableModel.random(3, 3, generator(seed)) for seed in (0, 1))
    tokens = sample_proposal(policy, None, 10, generator(2)).tokens
    reward, b = torch.randn(10, dtype=torch.float64, generator=generator(3)), 0.3
    log_pi, log_ref = policy.log_probs(tokens)[0], base.log_probs(tokens)[0].detach()

    pairs = preference_pairs(reward)
    loss = dpo_loss(log_pi.sum(-1)[pairs], log_ref.sum(-1)[pairs], b)
    log_ratio = (log_pi - log_ref).sum(-1).detach()
    coefficients = torch.zeros(10, 3, dtype=torch.float64)
    for better, worse in pairs.tolist():
        push = b / 5 * torch.sigmoid(b * (log_ratio[worse] - log_ratio[better]))
        coefficients[better], coefficients[worse] = -push, push
    actual = torch.autograd.grad(loss, policy.table, retain_graph=True)[0]
    torch.testing.assert_close(actual, policy_gradient(policy, tokens, coefficients), rtol=0, atol=1e-14)

    advantage = advantages(reward)
    loss = grpo_loss(log_pi, log_ref, advantage, b)
    coefficients = (b * (1 - (log_ref - log_pi).exp()) - advantage[:, None]).detach() / 30
    actual = torch.autograd.grad(loss, policy.table)[0]
    torch.testing.assert_close(actual, policy_gradient(policy, tokens, coefficients), rtol=0, atol=1e-14)


def test_mean_grpo_gradient_climbs_the_reward_and_descends_the_forward_kl():
    """Over all sequences, weighted by pi: the gradient of -E_pi[r] / T + b mean_t E_pi[KL(p^(0) || pi) of the next token]."""
    base, policy = (TableModel.random(3, 3, generator(seed)) for seed in (0, 1))
    tokens = Tree(policy).sequences()
    reward, b = torch.randn(27, dtype=torch.float64, generator=generator(3)), 0.7
    log_pi, logits, _ = policy.log_probs(tokens)
    log_ref, ref_logits, _ = base.log_probs(tokens)
    chances = log_pi.sum(-1).exp()
    losses = [
        grpo_loss(log_pi[n : n + 1], log_ref[n : n + 1].detach(), reward[n : n + 1], b) * chances[n].detach()
        for n in range(27)
    ]
    ref, pi = ref_logits.detach().log_softmax(-1), logits.log_softmax(-1)
    divergence = (ref.exp() * (ref - pi)).sum(-1).mean(-1)  # [27]
    objective = (-chances * reward / 3 + b * chances.detach() * divergence).sum()
    actual, expected = (torch.autograd.grad(x, policy.table, retain_graph=True)[0] for x in (sum(losses), objective))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


# pairs and advantages


def test_pairs_join_the_halves_rank_by_rank_and_leave_out_the_middle():
    pairs = preference_pairs(torch.tensor([3.0, -INFINITY, 5.0, 1.0, -INFINITY]))
    assert pairs.tolist() == [[2, 1], [0, 4]]
    assert preference_pairs(torch.zeros(4)).tolist() == [[0, 2], [1, 3]], "ties keep their order"


def test_advantages_are_standardised():
    advantage = advantages(torch.tensor([1.0, 2.0, 4.0, 9.0]))
    assert advantage.mean().abs() < 1e-15 and advantage.square().mean() == pytest.approx(1)
    assert advantage.argsort().tolist() == [0, 1, 2, 3]


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
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(InputError, match=r"^DPO, update 3: log phi is NaN or \+inf .*potential$"):
        rewards(lambda tokens: torch.tensor([-1.0, bad]), torch.zeros(2, 4), "DPO, update 3")


# whole runs


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", BASELINES)
def test_the_policy_gains_reward_and_the_base_stays(name, lora):
    base, potential = world()
    before = copy.deepcopy(base.model.state_dict())
    policy, figures = train(name, base, potential, config(learning_rate=3e-2 if lora else 1e-2), lora)
    with torch.no_grad():
        gain = [Tree(model).prefix_log_q()[-1].exp() @ potential.log_phi for model in (base, policy)]
    assert gain[1] > gain[0] + 0.5
    assert all(torch.equal(tensor, before[key]) for key, tensor in base.model.state_dict().items())
    assert policy.model.state_dict().keys() == before.keys(), "LoRA is merged"
    changed = {
        key.split(".", 2)[-1] for key, tensor in policy.model.state_dict().items() if (tensor != before[key]).any()
    }
    assert not lora or changed == {"attn.q_proj.weight", "attn.v_proj.weight"}
    assert lora or (len(figures) == 40 and len(changed) > 10)
    assert figures[0]["loss"] == pytest.approx(math.log(2) if name == "dpo" else 0, abs=1e-12)


@pytest.mark.parametrize("name", BASELINES)
def test_strength_holds_the_policy_to_the_base(name):
    base, potential = world()
    divergences = []
    for strength in (0.1, 20.0):
        policy, _ = train(name, base, potential, config(strength))
        with torch.no_grad():
            log_q = [Tree(model).prefix_log_q()[-1] for model in (policy, base)]
        divergences.append(kl_divergence(*log_q).item())
    assert 0 < divergences[1] < 0.6 * divergences[0]


@pytest.mark.parametrize("name", BASELINES)
def test_a_hard_potential_is_learned_from_samples_of_the_right_model(name):
    """phi is the indicator of token 2 in front. DPO's samples stay the reference's, GRPO's follow the policy."""
    base, _ = world()
    shares = []

    def log_phi(tokens):
        shares.append((tokens[:, 0] == 2).double().mean())
        return torch.where(tokens[:, 0] == 2, 0.0, -INFINITY)

    policy, _ = train(name, base, log_phi, config())
    with torch.no_grad():
        before, after = (Tree(model).log_p[0][0, 2].exp() for model in (base, policy))
    assert after > before + 0.2
    assert (
        abs(sum(shares[-10:]) / 10 - (before if name == "dpo" else after)) < 0.08
    )  # four standard errors of 640 samples


@pytest.mark.parametrize("name", BASELINES)
def test_batches_of_equal_rewards_give_finite_losses(name):
    """Nor does GRPO then leave the base: there the penalty has no gradient."""
    base, _ = world()
    options = dataclasses.replace(config(updates=5), weight_decay=0.0)
    policy, figures = train(name, base, lambda tokens: torch.full((len(tokens),), -0.1), options)
    assert all(math.isfinite(row["loss"]) for row in figures)
    if name == "grpo":
        assert all(torch.equal(*pair) for pair in zip(policy.model.parameters(), base.model.parameters(), strict=True))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", BASELINES)
def test_without_a_step_size_the_base_comes_back_to_the_bit(name, lora):
    base, potential = world()
    policy, _ = train(name, base, potential, config(learning_rate=0.0, updates=2), lora)
    assert all(torch.equal(*pair) for pair in zip(policy.model.parameters(), base.model.parameters(), strict=True))


def test_trained_lora_switched_off_equals_the_base_to_the_bit():
    base, potential = world()
    student = Student(base, 1e-2, 0.0, True, generator(0))
    tokens = sample_proposal(base, None, 32, generator(1)).tokens
    with torch.no_grad():
        expected = base.log_probs(tokens)[0]
    for _ in range(3):
        grpo_step(student, base, tokens, advantages(potential(tokens)), 0.1, "")
    with torch.no_grad():
        assert not torch.allclose(student.model.log_probs(tokens)[0], expected)
        for module in student.network.modules():
            if isinstance(module, LoRALinear):
                module.b.zero_()
        assert torch.equal(student.model.log_probs(tokens)[0], expected)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", BASELINES)
def test_gradient_in_parts_is_that_of_the_whole_batch(name, lora, monkeypatch):
    """22 sequences in parts of 8: the last part is smaller."""
    base, potential = world()
    tokens = sample_proposal(base, None, 22, generator(1)).tokens
    reward, results = potential(tokens), []
    with torch.no_grad():
        log_ref = base.log_probs(tokens)[0].sum(-1)
    for rows in (8, 22):
        monkeypatch.setattr(importlib.import_module(f"distill.{name}"), "ROWS", rows)
        student = Student(base, 1e-2, 0.0, lora, generator(0))
        for _ in range(2):  # away from the base, where every gradient of the penalty is zero
            if name == "dpo":
                pairs = preference_pairs(reward)
                loss = dpo_step(student, tokens[pairs], log_ref[pairs], 0.5, "")
            else:
                loss = grpo_step(student, base, tokens, advantages(reward), 0.5, "")
        results.append([torch.tensor(loss), *(parameter.grad for parameter in student.parameters)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", BASELINES)
def test_an_interrupted_run_ends_where_the_whole_one_does(name, lora):
    class Interrupted(Recorded):
        saved = None

        def steps(self, total, **state):
            done = 0
            if self.saved:
                done, states = self.saved
                for key, thing in state.items():
                    thing.set_state(states[key]) if key == "generator" else thing.load_state_dict(states[key])
            for step in range(done, total):
                yield step
                if step == 2 and not self.saved:
                    whole = {k: v.get_state() if k == "generator" else v.state_dict() for k, v in state.items()}
                    self.saved = step + 1, copy.deepcopy(whole)
                    return

    base, potential = world()
    expected, _ = train(name, base, potential, config(updates=6), lora)
    phase = Interrupted()
    BASELINES[name](base, potential, config(updates=6), lora, generator(0), phase)
    policy = BASELINES[name](base, potential, config(updates=6), lora, generator(0), phase)
    assert len(phase.figures) == 6
    assert all(torch.equal(*pair) for pair in zip(policy.model.parameters(), expected.model.parameters(), strict=True))


# guards


@pytest.mark.parametrize("name", BASELINES)
def test_a_loss_that_is_not_finite_stops_with_the_update(name):
    base = tiny(0)
    base.model.wte.weight.data[3] = torch.nan
    with pytest.raises(
        InputError, match=rf"^{name.upper()}, update 1: the loss is not finite; lower the learning rate$"
    ):
        train(name, base, lambda tokens: tokens.double().sum(-1), config())


def test_the_optimiser_does_not_step_on_a_loss_that_is_not_finite():
    base, _ = world()
    student = Student(base, 1e-2, 0.0, False, generator(0))
    with pytest.raises(InputError):
        student.step(lambda part: student.parameters[0].sum() * INFINITY, 4, 2, "DPO, update 9")
    assert all(torch.equal(*pair) for pair in zip(student.parameters, base.model.parameters(), strict=True))


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_is_not_finite_is_not_returned(lora):
    student = Student(tiny(0), 1e-2, 0.0, lora, generator(0))
    student.parameters[1].data[0] = torch.nan
    with pytest.raises(InputError, match=r"^DPO: the trained model is not finite; lower the learning rate$"):
        student.finish("DPO")


# options and costs


def test_grids_are_the_papers():
    assert DPO_GRID.strength == (0.1, 0.2, 0.4, 0.8) and GRPO_GRID.strength == (0.04, 0.08, 0.16, 0.32)
    for grid in (DPO_GRID, GRPO_GRID):
        found = grid.configs()
        assert len(set(found)) == 36
        assert {(c.updates, c.batch_size) for c in found} == {(1000, 1024)}
        assert {c.learning_rate for c in found} == {1e-3, 1e-4, 1e-5}
        assert {c.weight_decay for c in found} == {1e-2, 1e-3, 1e-4}
        assert {c.strength for c in found} == set(grid.strength)
    assert {c.updates for c in DPO_GRID.configs(updates=7, batch_size=8)} == {7}


def test_adamw_has_the_papers_settings():
    student = Student(tiny(0), 1e-4, 0.1, False, generator(0))
    decayed, spared = student.optimizer.param_groups
    assert decayed["betas"] == (0.9, 0.999) and (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): key for key, parameter in student.network.named_parameters()}
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    assert spared_names == {key for key in names.values() if "ln_" in key or key.endswith("bias")}
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


@pytest.mark.parametrize("name", BASELINES)
def test_cost_is_what_the_model_is_asked_for(name, monkeypatch):
    """Every position behind the prompt that goes through the network is counted, three times where there is a gradient."""
    base, potential = world()
    hidden, units, scored = GPTNeo.hidden, [], []

    def counted(self, ids, cache=None):
        if cache.length > 0:  # behind the prompt
            units.append(ids.numel() * (3 if torch.is_grad_enabled() else 1))
        return hidden(self, ids, cache)

    def log_phi(tokens):
        scored.append(len(tokens))
        return potential(tokens)

    monkeypatch.setattr(GPTNeo, "hidden", counted)
    options = config(updates=3, batch_size=11)
    train(name, base, log_phi, options)
    cost = COSTS[name](options)
    assert isinstance(cost, Cost) and cost.sampled == sum(scored) == 33
    assert cost.units(length=3) == sum(units)
