"""The sampler is unbiased over all paths; broken on purpose it is not, and a check notices.

A mutant is the code with one expression replaced, so it follows every change of the code.
"""

from unittest import mock

import pytest
import torch
import worlds
from worlds import INF, bias, broken, generator, gpt_neo_world, table_world

import tsmc.proposal
import tsmc.sampler
import tsmc.sigma
from tinystories import decoder
from tsmc.draws import effective_sample_size, multinomial, normalise, systematic
from tsmc.exact import TableModel
from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.sampler import EARLY, Rule
from tsmc.sigma import Sigma

ADAPTIVE = 0.9  # two particles then resample where the smaller weight is under a third
THRESHOLDS = (1.0, ADAPTIVE, 0.0)  # at .5 two particles never resample, three or more do
SCHEMES = (multinomial, systematic)
STUDENT = TableModel.random(2, 3, generator(3))  # p^(1)


def guided(world):
    """A world with a random prefix part, 0 where a text begins with 0, 1, as phi is there."""
    model, twist, potential = world
    size, length = model.vocab_size, model.length
    potential.log_f = [2 * torch.randn(size**t, generator=generator(t)) for t in range(length + 1)]
    potential.log_f = [log_f.double() for log_f in potential.log_f]
    potential.has_prefix = True
    potential.log_phi.view(size, size, -1)[0, 1] = -INF
    potential.log_f[2][1] = -INF
    return model, twist, potential


def at_all_rules(model, twist, potential, base=None, thresholds=THRESHOLDS) -> float:
    world = (model, twist, potential, base)
    return max(bias(*world, scheme, one) for one in thresholds for scheme in SCHEMES)


def ended_texts() -> float:
    """One token of two or two of three finish a text, with a prefix part or without, in tables and
    in a network; also where p^(1) draws."""
    short, several = table_world(2, 3, 1, end=(1,)), table_world(3, 2, 1, end=(2, 1))
    error = max(at_all_rules(*short), at_all_rules(*guided(several)))
    model, twist, potential = gpt_neo_world(2, 3, 2, end=(1,))
    student = worlds.GPTNeoModel(worlds.tiny_gpt_neo(2, 5).double(), model.prompt, 3, (1,))
    return max(error, bias(student, twist, potential, model))


def decoded_and_forced() -> float:
    """Sequences that end, as they are drawn, against teacher forcing: log p, log q and states."""
    error = 0.0
    for model, twist, _ in (gpt_neo_world(3, 6, 2, end=(2, 1)), table_world(3, 6, end=(1,))):
        with mock.patch.object(decoder, "MAX_LOGITS", 40):  # logits in slices
            drawn = sample_proposal(model, twist, 200, generator(0))
        forced = proposal_log_probs(model, twist, drawn.tokens)
        hidden = model.hidden(drawn.tokens)
        pairs = [(drawn.log_p.sum(1), forced[0]), (drawn.log_q.sum(1), forced[1])]
        pairs += [(drawn.hidden, hidden), (model.log_probs(drawn.tokens), drawn.log_p)]
        error = max([error, *((one - other).abs().max().item() for one, other in pairs)])
    return error


def schedule() -> float:
    """How far a run alone is from resampling when and what it should: where ESS / K is below .7, or
    below EARLY with a prefix part, by the weights gathered since it last did."""
    error = 0.0
    for threshold, world in ((0.7, table_world(3, 6, 8)), (0.0, guided(table_world(3, 6, 8)))):
        model, twist, potential = world
        steps, calls = [], []

        def ess(log_weights, steps=steps):
            steps.append(normalise(log_weights))
            return effective_sample_size(log_weights)

        def resample(weights, source, steps=steps, calls=calls):
            calls.append((len(steps) - 1, weights))
            return multinomial(weights, source)

        rule, source = Rule(resample, threshold), generator(0)
        with mock.patch.object(tsmc.sampler, "effective_sample_size", ess):
            for _ in range(20):
                sigma = Sigma(model, model, potential)
                population = tsmc.sampler.tsmc(sigma, twist, 6, source, 1, rule)
                found = effective_sample_size(population.log_weights) - population.ess
                error = max(error, found.abs().item())
        is_low = [1 / one.square().sum() < 6 * (threshold or EARLY) for one in steps]
        due = [n for n, is_due in enumerate(is_low) if is_due or n % 6 == 5]
        assert 30 < len(due) < 90
        error = max(error, float(due != [n for n, _ in calls]))
        error = max([error, *((steps[n] - one).abs().max().item() for n, one in calls)])
    return error


TABLE = table_world(2, 3)
CHECKS = {  # name: the largest error of all paths, or of another check
    "always": lambda: at_all_rules(*TABLE, thresholds=[1.0]),
    "adaptive": lambda: bias(*table_world(3, 3, 2), ess_threshold=ADAPTIVE),
    "at the end": lambda: at_all_rules(*TABLE, thresholds=[0.0]),
    "three tokens": lambda: at_all_rules(*table_world(3, 3, 2)),
    "network": lambda: bias(*gpt_neo_world(2, 3, 2)),
    "p^(1)": lambda: at_all_rules(STUDENT, *TABLE[1:], TABLE[0]),
    "prefix part": lambda: at_all_rules(*guided(table_world(2, 3, 2))),
    "ended texts": ended_texts,
    "decoder": decoded_and_forced,
    "schedule": schedule,
}


def forgotten(name: str) -> tuple[str, str]:
    """Particles are reordered, but for one thing that they carry."""
    return "value[parents]", f"value if name == '{name}' else value[parents]"


EVIDENCE = "evidence = log_z + log_mean_exp(log_weights)"
GAINED = "log_z = torch.where(is_due, evidence, log_z)"
LAST_GAINED = "log_z = log_z + log_mean_exp(log_w.view(runs, particles))"
KEPT = "log_weights = torch.where(is_due[:, None], 0.0, log_weights)"
DRAW = "resample(normalise(log_weights), generator)"
LAST = "step.log_p + log_phi - step.log_q"
ESS = "effective_sample_size(log_weights)"
ZERO_F = "log_f.masked_fill(log_f == -torch.inf, 0.0)"
MARK = "is_finished[:, None].to(hidden.dtype)"
FORCED_MARK = "is_finished[..., None].to(hidden.dtype)"
SAMPLER = {  # name: the check that notices it, what is replaced, by what
    "final correction dropped": ("always", LAST, "step.log_normaliser"),
    "log psi kept at the end": ("always", "- step.log_q - old.log_psi", "- step.log_q"),
    "log psi kept before": ("always", "log_normaliser - old.log_psi", "log_normaliser"),
    "log psi not reordered": ("always", *forgotten("log_psi")),
    "log p not reordered": ("p^(1)", *forgotten("log_p")),
    "tokens not reordered": ("always", *forgotten("tokens")),
    "table position not reordered": ("always", "[:, -1], parents)", "[:, -1])"),
    "cache not reordered": ("network", "[:, -1], parents)", "[:, -1])"),
    "ancestors of another run": ("always", "(start + ancestors)", "ancestors"),
    "log K dropped": ("always", EVIDENCE, "evidence = log_z + log_weights.logsumexp(-1)"),
    "every-step evidence": ("adaptive", GAINED, LAST_GAINED),
    "evidence of last weights": ("adaptive", "evidence = log_z + ", "evidence = "),
    "weights kept after resampling": ("always", KEPT, "pass"),
    "weights dropped without it": ("adaptive", KEPT, "log_weights = 0.0 * log_weights"),
    "no resampling at the end": ("adaptive", "is_last or threshold == 1", "threshold == 1"),
    "other weights resampled": ("always", DRAW, DRAW.replace("weights)", "weights).square()")),
    "no final samples": ("always", "samples = old.tokens", "samples = new.tokens"),
    "f leaves no trace in the weights": ("prefix part", "log_w = log_w + log_f", "pass"),
    "particles do not carry f": ("prefix part", f"step.log_psi + {ZERO_F}", "step.log_psi"),
    "f = 0 is divided out": ("prefix part", ZERO_F, "log_f"),
    "f counts at T too": ("prefix part", "sigma.has_prefix and not is_last", "sigma.has_prefix"),
    "ESS of the last increment": ("schedule", ESS, ESS.replace("log_weights", "log_w[None]")),
    "resampled at every step": ("schedule", "ess < threshold * particles", "ess < particles"),
    "no early resampling": ("schedule", "EARLY if sigma.has_prefix else 0.0", "0.0"),
}
OTHERS = {  # name: the check, the module, what is replaced, by what
    "phi^(m) without p^(0)": ("p^(1)", tsmc.sigma, "sequence_log_probs(self.base, tokens) +", ""),
    "phi^(m) without p^(m)": ("p^(1)", tsmc.sigma, "+ log_phi - log_p", "+ log_phi"),
    "log q not normalised": ("always", tsmc.proposal, "tokens] - log_normaliser", "tokens]"),
    "psi of another row": ("always", tsmc.proposal, "log_psi[share, tokens]", "log_psi[0, tokens]"),
    "rows not put back": ("decoder", tsmc.proposal, "[back] for", " for"),
    "no mark of a finished text": ("ended texts", decoder, MARK, f"0 * {MARK}"),
    "no mark in teacher forcing": ("decoder", decoder, FORCED_MARK, f"0 * {FORCED_MARK}"),
    "states read behind the end": ("decoder", decoder, "hidden = hidden.gather", "hidden.gather"),
    "states drawn behind it": ("decoder", decoder, "before[:, :-1], hidden)", "hidden, hidden)"),
}
MUTANTS = {name: (check, tsmc.sampler, *change) for name, (check, *change) in SAMPLER.items()}
MUTANTS |= OTHERS


@pytest.mark.parametrize("check", CHECKS)
def test_the_code_passes(check):
    assert CHECKS[check]() < 1e-11


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name):
    check, *change = MUTANTS[name]
    with broken(*change):
        try:
            assert CHECKS[check]() > 1e-3
        except ValueError as error:
            assert "log Z-hat is NaN or infinite" in str(error)
