"""Samplers broken on purpose, each caught by a check that the sampler itself passes: proof that the checks can fail.

A mutant is the source of `tsmc.sampler` with one expression replaced, so it follows the code as it changes.
"""

import importlib
import inspect
import types
from dataclasses import dataclass

import pytest
import torch
from worlds import every_path, generator, gpt_neo_world, sequence_numbers, table_world

import tsmc.sampler
from tsmc.exact import Target
from tsmc.table import TableModel
from tsmc.trace import Trace
from twist.potential import effective_potential

ADAPTIVE = 0.9


def evidence_and_samples(sampler, model, twist, potential, target, ess_threshold) -> float:
    """Largest error, over all random paths of two particles, of E[Z-hat] and of E[Z-hat * share of samples equal to s]."""
    chances, population = every_path(model, twist, potential, 2, "multinomial", ess_threshold, sampler=sampler)
    evidence = chances * population.log_z.exp()
    vocab_size = model.decoder(1).logits.shape[-1]
    numbers = sequence_numbers(population.samples().flatten(0, 1), vocab_size)
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


def conditional(sampler) -> float:
    """Error of E[Z / Z-hat] = 1 over all random paths and references."""
    model, twist, potential = table_world(2, 3, seed=2)
    target = Target(model, potential)
    references = target.tree.sequences()
    chances, population = every_path(model, twist, potential, 2, references=references, sampler=sampler)
    sigma = target.log_sigma[-1].exp().repeat_interleave(len(chances) // len(references))
    return abs((chances * sigma * (target.log_z - population.log_z).exp()).sum().item() - 1)


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


@dataclass
class Mutant:
    """What is broken, the expression that is replaced, by what, and the check that catches it."""

    name: str
    right: str
    wrong: str
    check: object

    def module(self) -> types.ModuleType:
        """`tsmc.sampler` with the expression replaced."""
        source = inspect.getsource(importlib.import_module("tsmc.sampler"))
        assert source.count(self.right) == 1, f"{self.name}: the expression is no longer in the sampler"
        module = types.ModuleType("mutant")
        exec(compile(source.replace(self.right, self.wrong), self.name, "exec"), module.__dict__)
        return module


FINAL = "log_w = (step.log_p + log_phi - step.log_q).view(runs, particles) - log_psi"
EVIDENCE = "log_z = torch.where(resampling, log_z + log_mean_exp(log_weights), log_z)"
REORDER = "log_p, log_psi = log_p.gather(1, ancestors), log_psi.gather(1, ancestors)"
EXTEND = "decoder.extend(tokens[..., -1].flatten(), rows.flatten())"
DRAW = "resample(normalise(log_weights), generator)"

MUTANTS = [
    Mutant(
        "final correction dropped", FINAL, "log_w = step.log_normaliser.view(runs, particles) - log_psi", every_step
    ),
    Mutant("log psi of the last step not divided out", FINAL, FINAL.removesuffix(" - log_psi"), every_step),
    Mutant(
        "intermediate log psi not divided out",
        "step.log_normaliser.view(runs, particles) - log_psi",
        "step.log_normaliser.view(runs, particles)",
        every_step,
    ),
    Mutant("log psi not reordered", REORDER, "log_p = log_p.gather(1, ancestors)", every_step),
    Mutant("log p not reordered", REORDER, "log_psi = log_psi.gather(1, ancestors)", generation_one),
    Mutant(
        "tokens not reordered", "tokens = tokens.gather(1, ancestors[..., None].expand_as(tokens))", "pass", every_step
    ),
    Mutant("table position not reordered", EXTEND, "decoder.extend(tokens[..., -1].flatten())", every_step),
    Mutant("cache not reordered", EXTEND, "decoder.extend(tokens[..., -1].flatten())", on_gpt_neo),
    Mutant(
        "ancestors of one run used in another", "rows = ancestors + particles *", "rows = ancestors + 0 *", every_step
    ),
    Mutant("log K dropped", "log_z + log_mean_exp(log_weights)", "log_z + log_weights.logsumexp(-1)", every_step),
    Mutant("every-step evidence under adaptive resampling", EVIDENCE, "log_z = log_z + log_mean_exp(log_w)", adaptive),
    Mutant("evidence of the last increment only", EVIDENCE, EVIDENCE.replace("(log_weights)", "(log_w)"), adaptive),
    Mutant(
        "weights kept after resampling", "torch.where(resampling[:, None], 0.0, log_weights)", "log_weights", every_step
    ),
    Mutant(
        "weights dropped without resampling",
        "torch.where(resampling[:, None], 0.0, log_weights)",
        "0.0 * log_weights",
        adaptive,
    ),
    Mutant(
        "ESS of the last increment",
        "ess = effective_sample_size(log_weights)",
        "ess = effective_sample_size(log_w)",
        effective_sample_size,
    ),
    Mutant(
        "resampling from the last increment", DRAW, "resample(normalise(log_weights).square(), generator)", every_step
    ),
    Mutant(
        "final samples not resampled",
        "return self.tokens.gather(1, self.ancestors[..., None].expand_as(self.tokens))",
        "return self.tokens",
        every_step,
    ),
    Mutant("reference lost in resampling", "(itself == 0) & conditional", "(itself == 0) & False", conditional),
    Mutant(
        "reference without offspring",
        DRAW,
        "resample(normalise(log_weights).index_fill(1, itself[0, :1], 0.0), generator)",
        conditional,
    ),
    Mutant(
        "reference's tokens drawn anew",
        "given = None if reference is None else",
        "given = None if True else",
        conditional,
    ),
]
CHECKS = [every_step, adaptive, on_gpt_neo, generation_one, conditional, effective_sample_size]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sampler_passes(check):
    assert check(tsmc.sampler) < 1e-12


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant):
    assert mutant.check(mutant.module()) > 1e-3


def test_every_step_evidence_is_right_where_every_step_resamples():
    """The two ways to sum the evidence part only under adaptive resampling, which is why they are mixed up."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("every-step evidence"))
    assert every_step(mutant.module()) < 1e-12
