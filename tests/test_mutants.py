"""Samplers broken on purpose, each caught by a check that the sampler itself passes: proof that the checks can fail.

A mutant is the source of `tsmc.sampler`, or of `tsmc.conditional`, with one expression replaced, so it follows the code as it
changes.
"""

import inspect
import re
import types
from dataclasses import dataclass

import pytest
import torch
from worlds import every_conditional_path, every_path, generator, gpt_neo_world, sequence_numbers, table_world

import tsmc.conditional
import tsmc.population
import tsmc.sampler
from tsmc.exact import Target
from tsmc.table import TableModel
from tsmc.trace import Trace
from twist.potential import effective_potential

ADAPTIVE = 0.9


def evidence_and_samples(sampler, model, twist, potential, target, ess_threshold) -> float:
    """Largest error, over all random paths of two particles, of E[Z-hat] and of E[Z-hat * share of samples equal to s]."""
    chances, population = every_path(model, twist, potential, 2, "multinomial", ess_threshold, module=sampler)
    evidence = chances * population.log_z.exp()
    vocab_size = model.decoder(1).logits.shape[-1]
    numbers = sequence_numbers(population.samples.flatten(0, 1), vocab_size)
    measure = torch.zeros_like(target.log_sigma[-1]).index_add(0, numbers, (evidence / 2).repeat_interleave(2))
    joint = (target.log_sigma[-1] + target.log_z).exp()
    return max((measure - joint).abs().max().item(), (evidence.sum() - joint.sum()).abs().item())


def on_a_table(sampler, ess_threshold: float) -> float:
    model, twist, potential = table_world(3, 3, seed=2)
    return evidence_and_samples(sampler, model, twist, potential, Target(model, potential), ess_threshold)


def every_step(sampler) -> float:
    return on_a_table(sampler, 1.0)


def adaptive(sampler) -> float:
    return on_a_table(sampler, ADAPTIVE)


def on_gpt_neo(sampler) -> float:
    model, twist, potential = gpt_neo_world(2, 3, seed=2)
    return evidence_and_samples(sampler, model, twist, potential, Target(model, potential), 1.0)


def generation_one(sampler) -> float:
    base, twist, potential = table_world(2, 3, seed=2)
    student = TableModel.random(2, 3, generator(3))
    effective = effective_potential(potential, base)
    return evidence_and_samples(sampler, student, twist, effective, Target(base, potential), 1.0)


def conditional(module) -> float:
    """Error of E[Z / Z-hat] = 1 over all random paths and references."""
    model, twist, potential = table_world(2, 3, seed=2)
    target = Target(model, potential)
    chances, population = every_conditional_path(model, twist, potential, target, 2, module=module)
    return abs((chances * (target.log_z - population.log_z).exp()).sum().item() - 1)


def effective_sample_size(sampler) -> float:
    """Largest error of the recorded ESS against that of the weights gathered since the last resampling."""
    model, twist, potential = table_world(3, 6, seed=8)
    trace, error = Trace(), 0.0
    sampler.tsmc(model, twist, potential, 6, generator(0), 50, ess_threshold=0.7, observer=trace)
    gathered = torch.zeros(50, 6, dtype=torch.float64)
    for log_w, ess in zip(trace.log_w, trace.ess, strict=True):
        gathered = gathered + log_w
        wanted = 1 / gathered.softmax(-1).square().sum(-1)
        error = max(error, (wanted - ess).abs().max().item())
        gathered = torch.where((wanted < 0.7 * 6)[:, None], 0.0, gathered)
    return error


def original(check) -> types.ModuleType:
    """The module that a check is for."""
    return tsmc.conditional if check is conditional else tsmc.sampler


@dataclass
class Mutant:
    """What is broken, the expression that is replaced, by what, and the check that catches it."""

    name: str
    right: str
    wrong: str
    check: object

    def module(self) -> types.ModuleType:
        """The module with the expression replaced."""
        code = re.sub(
            r"^from tsmc\.population import .*\n", "", inspect.getsource(original(self.check)), flags=re.MULTILINE
        )
        source = inspect.getsource(tsmc.population) + code  # what the population does with its ancestors is part of it
        assert source.count(self.right) == 1, f"{self.name}: the expression is no longer there"
        module = types.ModuleType("mutant")
        exec(compile(source.replace(self.right, self.wrong), self.name, "exec"), module.__dict__)
        return module


FINAL = "self.log_w = self.step.log_p + self.log_phi - self.step.log_q - self.log_psi"
BEFORE = "self.log_w = self.step.log_normaliser - self.log_psi"
EVIDENCE = "self.log_z = torch.where(is_due, self.log_z + log_mean_exp(self.log_weights), self.log_z)"
RESET = "self.log_weights = torch.where(is_due[:, None], 0.0, self.log_weights)"
ESS = "self.ess = effective_sample_size(self.log_weights)"
TOKENS = "self.tokens = follow(ancestors, self.tokens)"
REORDER = "self.log_p, self.log_psi = follow(ancestors, self.log_p), follow(ancestors, self.log_psi)"
EXTEND = "self.decoder.extend(self.tokens[..., -1].flatten(), (first_rows + ancestors).flatten())"
IN_PLACE = "self.decoder.extend(self.tokens[..., -1].flatten())"
DRAW = "resample(normalise(self.log_weights), generator)"
DRAW_GIVEN = "cloud.draw_ancestors(is_due, multinomial, generator)"
BARREN = "lambda weights, source: multinomial(weights.index_fill(1, torch.tensor([0]), 0.0), source)"

MUTANTS = [
    Mutant("final correction dropped", FINAL, BEFORE, every_step),
    Mutant("log psi of the last step not divided out", FINAL, FINAL.removesuffix(" - self.log_psi"), every_step),
    Mutant("intermediate log psi not divided out", BEFORE, BEFORE.removesuffix(" - self.log_psi"), every_step),
    Mutant("log psi not reordered", REORDER, "self.log_p = follow(ancestors, self.log_p)", every_step),
    Mutant("log p not reordered", REORDER, "self.log_psi = follow(ancestors, self.log_psi)", generation_one),
    Mutant("tokens not reordered", TOKENS, "pass", every_step),
    Mutant("table position not reordered", EXTEND, IN_PLACE, every_step),
    Mutant("cache not reordered", EXTEND, IN_PLACE, on_gpt_neo),
    Mutant("ancestors of one run used in another", "first_rows + ancestors", "0 * first_rows + ancestors", every_step),
    Mutant("log K dropped", "log_mean_exp(self.log_weights)", "self.log_weights.logsumexp(-1)", every_step),
    Mutant(
        "every-step evidence under adaptive resampling",
        EVIDENCE,
        "self.log_z = self.log_z + log_mean_exp(self.log_w)",
        adaptive,
    ),
    Mutant("evidence of the last increment only", EVIDENCE, EVIDENCE.replace("log_weights", "log_w"), adaptive),
    Mutant("weights kept after resampling", RESET, "pass", every_step),
    Mutant("weights dropped without resampling", RESET, "self.log_weights = 0.0 * self.log_weights", adaptive),
    Mutant("ESS of the last increment", ESS, ESS.replace("log_weights", "log_w"), effective_sample_size),
    Mutant("resampling from other weights", DRAW, DRAW.replace("weights)", "weights).square()"), every_step),
    Mutant(
        "final samples not resampled", "samples = follow(ancestors, self.tokens)", "samples = self.tokens", every_step
    ),
    Mutant("reference lost in resampling", "ancestors[:, 0] = 0", "pass", conditional),
    Mutant("reference without offspring", DRAW_GIVEN, DRAW_GIVEN.replace("multinomial", BARREN), conditional),
    Mutant("reference's tokens drawn anew", "forced[:, 0] = reference[:, t]", "pass", conditional),
]
CHECKS = [every_step, adaptive, on_gpt_neo, generation_one, conditional, effective_sample_size]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sampler_passes(check):
    assert check(original(check)) < 1e-12


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant):
    assert mutant.check(mutant.module()) > 1e-3


def test_every_step_evidence_is_right_where_every_step_resamples():
    """The two ways to sum the evidence part only under adaptive resampling, which is why they are mixed up."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("every-step evidence"))
    assert every_step(mutant.module()) < 1e-12
