"""The sampler is unbiased over all paths; broken on purpose, it is not, and a check notices.

A mutant is the source of a module with one expression replaced, so it follows every change of the
code.
"""

import pytest
import torch
import worlds
from worlds import bias, generator, mutant, table_world

import tsmc.proposal
import tsmc.sampler
from tsmc.draws import normalise
from tsmc.exact import TableModel, Target
from tsmc.sampler import EARLY, Rule, lineages
from tsmc.sigma import Sigma, effective_potential

ADAPTIVE = 0.9  # two particles then resample where the smaller weight is under a third


def generation_one(sampler) -> float:
    base, twist, potential = table_world(2, 3, seed=2)
    student = TableModel.random(2, 3, generator(3))
    world = (student, twist, effective_potential(potential, base))
    return bias(*world, target=Target(base, potential), module=sampler)


def records(sampler) -> float:
    """Largest error of a trace, and share of steps that wrongly resample or do not.

    ESS and resampling follow from the weights since the last resampling. The ancestors give the
    samples, and each step multiplies Z-hat by the mean of w under the weights from before it. With
    a prefix part the threshold is EARLY at least.
    """
    model, twist, potential = table_world(3, 6, seed=8)
    errors = []
    for threshold, log_prefix in ((0.7, None), (0.0, lambda tokens: -1.0 * (tokens == 0).sum(-1))):
        trace, gathered = [], torch.zeros(50, 6, dtype=torch.float64)
        sigma, rule = Sigma(model, potential, log_prefix), Rule(ess_threshold=threshold)
        population = sampler.tsmc(sigma, twist, 6, generator(0), 50, rule, trace)
        evidence, lines = 0.0, lineages(trace)  # [R], [T, R, K]
        for t, step in enumerate(trace):
            gathered = gathered + step.log_w
            ess = 1 / gathered.softmax(-1).square().sum(-1)
            is_due = (ess < (threshold or EARLY) * 6) | torch.tensor(t == 5)
            is_moved = (step.ancestors != torch.arange(6)).any(-1)  # but once in thousands
            before = normalise(gathered - step.log_w)  # [R, K]
            evidence = evidence + (before * step.log_w.exp()).sum(-1).log()
            samples = step.tokens.gather(1, lines[t])  # [R, K]
            errors += [((is_moved != is_due).double().mean() - 0.05).clamp(min=0), step.ess - ess]
            errors += [step.log_weights - gathered, step.log_z - evidence]
            errors += [samples - population.samples[..., t]]
            gathered = torch.where(is_due[:, None], 0.0, gathered)
        errors += [evidence - population.log_z, ess - population.ess]
    return torch.cat([error.abs().flatten() for error in errors]).max().item()


def dead_beginnings(sampler) -> float:
    """phi = 0 on all texts that begin with 0, 1, and a random prefix part f that is 0 there."""
    model, twist, potential = table_world(2, 3, seed=2)
    potential.log_phi[2:4] = -torch.inf
    log_f = [2 * torch.randn(2**t, generator=generator(t)).double() for t in range(4)]
    log_f[2][1] = -torch.inf

    def log_prefix(tokens: torch.Tensor) -> torch.Tensor:
        return log_f[tokens.shape[1]][worlds.sequence_numbers(tokens, 2)]

    rules = [{"ess_threshold": one, "log_prefix": log_prefix} for one in (0.0, ADAPTIVE, 1.0)]
    return max(bias(model, twist, potential, module=sampler, **rule) for rule in rules)


def ended_texts(sampler) -> float:
    """With a prefix part or without; two tokens of three may finish a text."""
    ended = [worlds.ended_world(2, 3), worlds.ended_world(3, 2, end=(1, 2))]
    rules = [{"ess_threshold": 0.0}, {"ess_threshold": 1.0}]
    rules += [{"log_prefix": lambda tokens: -0.7 * (tokens == 0).sum(-1).double()}]
    return max(bias(*world, module=sampler, **rule) for world in ended for rule in rules)


TABLE, NETWORK = table_world(3, 3, 2), worlds.gpt_neo_world(2, 3, 2)
CHECKS = {  # name: an error of the sampler in a module
    "always": lambda module: bias(*TABLE, module=module),
    "adaptive": lambda module: bias(*TABLE, ess_threshold=ADAPTIVE, module=module),
    "at the end": lambda module: bias(*TABLE, ess_threshold=0.0, module=module),
    "network": lambda module: bias(*NETWORK, module=module),
    "generation one": generation_one,
    "dead beginnings": dead_beginnings,
    "ended texts": ended_texts,
    "records": records,
}


def forgotten(name: str) -> tuple[str, str]:
    """Particles are reordered, but for one thing that they own."""
    return "value[parents]", f"value if name == '{name}' else value[parents]"


EVIDENCE = "evidence = log_z + log_mean_exp(log_weights)"
GAINED = "log_z = torch.where(is_due, evidence, log_z)"
ESS = "ess = effective_sample_size(log_weights)"
KEPT = "log_weights = torch.where(is_due[:, None], 0.0, log_weights)"
EXTEND = "[:, -1], parents)"
DRAW = "resample(normalise(log_weights), generator)"
ZERO_F = "log_f.masked_fill(log_f == -torch.inf, 0.0)"
HAS_F = "log_prefix is not None"
LAST = "step.log_p + log_phi - step.log_q"
MUTANTS = {  # name: the check that notices it, what is replaced, by what
    "final correction dropped": ("always", LAST, "step.log_normaliser"),
    "log psi kept at the end": ("always", "- step.log_q - before.log_psi", "- step.log_q"),
    "log psi kept before": ("always", "log_normaliser - before.log_psi", "log_normaliser"),
    "log psi not reordered": ("always", *forgotten("log_psi")),
    "log p not reordered": ("generation one", *forgotten("log_p")),
    "tokens not reordered": ("always", *forgotten("tokens")),
    "table position not reordered": ("always", EXTEND, "[:, -1])"),
    "cache not reordered": ("network", EXTEND, "[:, -1])"),
    "ancestors of another run": ("always", "parents = (start + ancestors)", "parents = ancestors"),
    "log K dropped": ("always", EVIDENCE, "evidence = log_z + log_weights.logsumexp(-1)"),
    "every-step evidence": ("adaptive", GAINED, "log_z = log_z + log_mean_exp(log_w)"),
    "evidence of last weights": ("adaptive", EVIDENCE, EVIDENCE.replace("weights", "w")),
    "weights kept after resampling": ("always", KEPT, "pass"),
    "weights dropped without it": ("adaptive", KEPT, "log_weights = 0.0 * log_weights"),
    "no resampling at the end": ("adaptive", "is_last or ess_threshold == 1", "ess_threshold == 1"),
    "ESS of the last increment": ("records", ESS, "ess = effective_sample_size(log_w)"),
    "resampled at every step": ("records", "ess_threshold * particles)", "particles)"),
    "other weights resampled": ("always", DRAW, DRAW.replace("weights)", "weights).square()")),
    "no final samples": ("always", "own.take(parents).tokens", "own.tokens"),
    "f leaves no trace in the weights": ("dead beginnings", "log_w = log_w + log_f", "pass"),
    "f is not divided out": ("dead beginnings", "log_w - before.log_f", "log_w"),
    "f = 0 is divided out": ("dead beginnings", ZERO_F, "log_f"),
    "f not reordered": ("dead beginnings", *forgotten("log_f")),
    "no early resampling": ("records", "max(rule.ess_threshold, EARLY)", "rule.ess_threshold"),
    "f counts at T too": ("dead beginnings", "log_prefix is not None and not is_last", HAS_F),
}
WAITING = [  # in tsmc/proposal.py: what a finished text keeps, or gets without its wait
    ("log_q=step.log_q.masked_fill(is_finished, 0.0)", "log_q=step.log_q"),
    ("log_p=step.log_p.masked_fill(is_finished, 0.0)", "log_p=step.log_p"),
    ("torch.where(is_finished, before, step.tokens)", "step.tokens"),
    ("torch.where(is_finished, before, step.tokens)", "step.tokens.masked_fill(is_finished, 1)"),
    ("torch.where(is_finished, log_psi, step.log_psi)", "step.log_psi"),
    ("torch.where(is_finished, log_psi, step.log_normaliser)", "step.log_normaliser"),
]


@pytest.mark.learned
@pytest.mark.parametrize("check", CHECKS)
def test_the_code_passes(check):
    assert CHECKS[check](tsmc.sampler) < 1e-12


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name):
    check, *change = MUTANTS[name]
    try:
        assert CHECKS[check](mutant(tsmc.sampler, change)) > 1e-3
    except ValueError as error:
        assert "log Z-hat is NaN or infinite" in str(error)


@pytest.mark.parametrize("change", WAITING)
def test_a_text_that_does_not_wait_is_caught(change):
    broken = mutant(tsmc.sampler)
    broken.wait = mutant(tsmc.proposal, change).wait
    assert CHECKS["ended texts"](broken) > 1e-3
