"""Code broken on purpose, each break noticed by a check that the right code passes.

A mutant is the source of a module with one expression replaced, so it follows every change of the
code.
"""

import pytest
import torch
from worlds import ADAPTIVE, bias, generator, gpt_neo_world, mutant, table_world

import tsmc.proposal
import tsmc.sampler
from tsmc.exact import TableModel, Target
from tsmc.trace import Trace
from twist.potential import effective_potential


def generation_one(sampler) -> float:
    base, twist, potential = table_world(2, 3, seed=2)
    student = TableModel.random(2, 3, generator(3))
    world = (student, twist, effective_potential(potential, base))
    return bias(*world, target=Target(base, potential), module=sampler)


def sample_size(sampler) -> float:
    """Largest error of the recorded ESS, and share of the steps that wrongly resample or do not.

    Both follow from the weights since the last resampling.
    """
    model, twist, potential = table_world(3, 6, seed=8)
    trace, error, gathered = Trace(), 0.0, torch.zeros(50, 6, dtype=torch.float64)
    options = {"ess_threshold": 0.7, "observer": trace}
    sampler.tsmc(model, twist, potential, 6, generator(0), 50, **options)
    for t in range(6):
        gathered = gathered + trace.log_w[t]
        ess = 1 / gathered.softmax(-1).square().sum(-1)
        is_due = (ess < 0.7 * 6) | torch.tensor(t == 5)
        is_moved = (trace.ancestors[t] != torch.arange(6)).any(-1)  # but once in thousands
        wrong = (is_moved != is_due).double().mean().item()
        error = max(error, wrong, (trace.ess[t] - ess).abs().max().item())
        gathered = torch.where(is_due[:, None], 0.0, gathered)
    return error


TABLE, NETWORK = table_world(3, 3, 2), gpt_neo_world(2, 3, 2)
CHECKS = {  # name: an error of the sampler in a module
    "always": lambda module: bias(*TABLE, module=module),
    "adaptive": lambda module: bias(*TABLE, ess_threshold=ADAPTIVE, module=module),
    "on GPT-Neo": lambda module: bias(*NETWORK, module=module),
    "generation one": generation_one,
    "sample size": sample_size,
}
EVIDENCE = "evidence = log_z + log_mean_exp(log_weights)"
GAINED = "log_z = torch.where(is_due, evidence, log_z)"
ESS = "ess = effective_sample_size(log_weights)"
KEPT = "log_weights = torch.where(is_due[:, None], 0.0, log_weights)"
EXTEND = ", (particles * run + ancestors).flatten())"
DRAW = "resample(normalise(log_weights), generator)"
LAST = "step.log_p + log_phi - step.log_q"
MUTANTS = {  # name: the check that notices it, what is replaced, by what
    "final correction dropped": ("always", LAST, "step.log_normaliser"),
    "log psi kept at the end": ("always", "- step.log_q - log_psi.flatten()", "- step.log_q"),
    "log psi kept before": ("always", "log_normaliser - log_psi.flatten()", "log_normaliser"),
    "log psi not reordered": ("always", "log_psi = log_psi[run, ancestors]", "pass"),
    "log p not reordered": ("generation one", "log_p = log_p[run, ancestors]", "pass"),
    "tokens not reordered": ("always", " tokens = tokens[run, ancestors]", " pass"),
    "table position not reordered": ("always", EXTEND, ")"),
    "cache not reordered": ("on GPT-Neo", EXTEND, ")"),
    "ancestors of another run": ("always", "particles * run + ancestors", "ancestors"),
    "log K dropped": ("always", EVIDENCE, "evidence = log_z + log_weights.logsumexp(-1)"),
    "every-step evidence": ("adaptive", GAINED, "log_z = log_z + log_mean_exp(log_w)"),
    "evidence of last weights": ("adaptive", EVIDENCE, EVIDENCE.replace("weights", "w")),
    "weights kept after resampling": ("always", KEPT, "pass"),
    "weights dropped without it": ("adaptive", KEPT, "log_weights = 0.0 * log_weights"),
    "no resampling at the end": ("adaptive", " | is_last", ""),
    "ESS of the last increment": ("sample size", ESS, "ess = effective_sample_size(log_w)"),
    "resampled at every step": ("sample size", "ess_threshold * particles)", "particles)"),
    "other weights resampled": ("always", DRAW, DRAW.replace("weights)", "weights).square()")),
    "no final samples": ("always", "samples = tokens[run, ancestors]", "samples = tokens"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_code_passes(check):
    assert CHECKS[check](tsmc.sampler) < 1e-12


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name):
    check, *change = MUTANTS[name]
    assert CHECKS[check](mutant(tsmc.sampler, change)) > 1e-3
