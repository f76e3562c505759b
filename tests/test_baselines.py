"""DPO and GRPO as whole runs: what a few updates do to a world that can be enumerated, guards, options, costs."""

import copy
import dataclasses
import importlib
import math

import pytest
import torch
from test_twist import tiny
from worlds import ListedPotential, Recorded, generator, gpt_neo_world

from distill import DPO_GRID, GRPO_GRID, BaselineConfig, Cost, dpo, dpo_cost, finetune, grpo, grpo_cost
from distill.finetune import Student
from distill.lora import LoRALinear
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo
from tsmc.exact import Tree, kl_divergence
from tsmc.trajectories import sample_proposal

BASELINES = {"dpo": dpo, "grpo": grpo}
COSTS = {"dpo": dpo_cost, "grpo": grpo_cost}
INFINITY = math.inf


def config(strength=0.1, learning_rate=1e-2, updates=40, batch_size=64) -> BaselineConfig:
    return BaselineConfig(learning_rate, 1e-2, strength, updates, batch_size)


def train(name, base, log_phi, options, lora=False, seed=0):
    """The trained model and everything that was reported."""
    steps = Recorded(options.updates, name.upper())
    return BASELINES[name](base, log_phi, options, lora, generator(seed), steps), steps.reports


def world(seed=0):
    """A tiny GPT-Neo of 3 tokens and a potential, 27 sequences, float64."""
    base, _, potential = gpt_neo_world(3, 3, seed)
    return base, ListedPotential(3 * potential.log_phi, 3)


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
    assert len(figures) == 40 and (lora or len(changed) > 10)
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


@pytest.fixture
def unmerged(monkeypatch):
    """Leaves LoRA in the trained model, beside the weights that it changes."""
    monkeypatch.setattr(finetune, "merge_lora", lambda model: None)


def test_trained_lora_switched_off_equals_the_base_to_the_bit(unmerged):
    base, potential = world()
    tokens = sample_proposal(base, None, 32, generator(1)).tokens
    policy, _ = train("grpo", base, potential, config(updates=3), lora=True)
    with torch.no_grad():
        expected = base.log_probs(tokens)[0]
        assert not torch.allclose(policy.log_probs(tokens)[0], expected)
        for module in policy.model.modules():
            if isinstance(module, LoRALinear):
                module.b.zero_()
        assert torch.equal(policy.log_probs(tokens)[0], expected)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", BASELINES)
def test_gradient_in_parts_is_that_of_the_whole_batch(name, lora, monkeypatch, unmerged):
    """22 sequences in parts of 8: the last part is smaller. The second gradient is that away from the base."""
    base, potential = world()
    results = []
    for rows in (8, 44):
        monkeypatch.setattr(importlib.import_module(f"distill.{name}"), "ROWS", rows)
        policy, figures = train(name, base, potential, config(0.5, updates=2, batch_size=22), lora)
        gradients = [parameter.grad for parameter in policy.model.parameters() if parameter.requires_grad]
        results.append([torch.tensor([row["loss"] for row in figures]).double(), *gradients])
    assert len(results[0]) > 4 and max(gradient.abs().max() for gradient in results[0][1:]) > 1e-3
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


# guards


@pytest.mark.parametrize("name", BASELINES)
def test_a_loss_that_is_not_finite_stops_before_the_step(name, monkeypatch):
    stepped, base = [], tiny(0)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: stepped.append(self))
    base.model.wte.weight.data[3] = torch.nan
    with pytest.raises(InputError, match=rf"^{name.upper()}, step 1: loss is nan; lower the learning rate$"):
        train(name, base, lambda tokens: tokens.double().sum(-1), config())
    assert not stepped


@pytest.mark.parametrize("name", BASELINES)
def test_a_reward_that_is_no_number_stops_with_the_step(name):
    values = iter((-1.0, math.nan))
    with pytest.raises(InputError, match=rf"^{name.upper()}, step 2: log phi is NaN or \+inf on a sample"):
        train(name, world()[0], lambda tokens: torch.full((len(tokens),), next(values)), config())


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_is_not_finite_is_not_returned(lora):
    student = Student(tiny(0).model, 1e-2, 0.0, lora, generator(0))
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
    student = Student(tiny(0).model, 1e-4, 0.1, False, generator(0))
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
