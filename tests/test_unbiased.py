"""The sampler is unbiased over all paths; mutants, with one expression replaced, are not."""

from unittest import mock

import pytest
import torch
from tables import TableModel
from worlds import INF, bias, broken, generator, gpt_neo_world, table_world

import tsmc.mixture
import tsmc.proposal
import tsmc.sampler
import tsmc.sigma
from tests.exact import Target
from tinystories import decoder
from tsmc.draws import multinomial, systematic
from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.sampler import EARLY, Rule
from tsmc.sigma import Sigma

ADAPTIVE = 0.9  # at .5 two particles never resample, here where the smaller weight is under a third
STUDENT = TableModel.random(2, 3, generator(3))  # p^(1)


def guided(world):
    """A world with a random prefix part, 0 where a text begins with 0, 1, as phi is there."""
    model, twist, potential = world
    size, steps = model.vocab_size, range(model.length + 1)
    log_f = [2 * torch.randn(size**t, generator=generator(t)).double() for t in steps]
    potential.log_phi.view(size, size, -1)[0, 1] = log_f[2][1] = -INF
    potential.log_f, potential.has_prefix = log_f, True
    return model, twist, potential


def at_all_rules(*world, thresholds=(1.0, ADAPTIVE, 0.0)) -> float:
    rules = [(scheme, one) for scheme in (multinomial, systematic) for one in thresholds]
    return max(bias(*world, scheme=scheme, ess_threshold=one) for scheme, one in rules)


def ended_texts() -> float:
    """Tables in which one token of two or two of three finish a text, and a network, with a prefix
    part or without; also where p^(1) draws."""
    short, several = table_world(2, 3, 1, end=(1,)), table_world(3, 2, 1, end=(2, 1))
    model, twist, potential = gpt_neo_world(2, 3, 2, end=(1,))
    student = gpt_neo_world(2, 3, 5, end=(1,))[0]
    errors = [at_all_rules(*short), at_all_rules(*guided(several))]
    return max(*errors, bias(student, twist, potential, model))


def forced_texts() -> float:
    """Texts that end, as they are drawn, against teacher forcing: their states, log p and log q."""
    errors = []
    for model, twist, _ in (gpt_neo_world(3, 6, 2, end=(2, 1)), table_world(3, 6, end=(1,))):
        with mock.patch.object(decoder, "MAX_LOGITS", 12):  # logits in slices
            drawn = sample_proposal(model, twist, 200, generator(0))
        log_p, log_q = proposal_log_probs(model, twist, drawn.tokens)
        errors += [drawn.hidden - model.hidden(drawn.tokens), drawn.log_q.sum(1) - log_q]
        errors += [drawn.log_p - model.log_probs(drawn.tokens), drawn.log_p.sum(1) - log_p]
    return max(error.abs().max().item() for error in errors)


def early_resampling() -> float:
    """By how much ESS / K of runs that resample early is above .7, or above EARLY with a prefix
    part; 1 where none does."""
    errors = []
    for threshold, world in ((0.7, table_world(3, 6, 8)), (0.0, guided(table_world(3, 6, 8)))):
        model, twist, potential = world
        scheme, ess = mock.Mock(side_effect=multinomial), []
        for seed in range(20):
            rule, start = Rule(scheme, threshold), scheme.call_count
            tsmc.sampler.tsmc(Sigma(model, model, potential), twist, 6, generator(seed), 1, rule)
            early = scheme.call_args_list[start:-1]  # the last one is that at T
            ess += [1 / call.args[0].square().sum().item() / 6 for call in early]
        errors.append(max(ess, default=INF) - (threshold or EARLY))
    return max(0.0, min(1.0, max(errors)))


def mixture_of_p_and_q() -> float:
    """E[w u] of a mixture for u of one text each, where q rules out a token as well."""
    model, twist, potential = table_world(2, 3)
    errors = []
    for level in (0.0, -INF):
        with torch.no_grad():
            twist.log_psi[0] += level
        target = Target(model, potential)
        log_p, log_q = target.log_p[-1], target.tree.prefix_log_q(twist)[-1]
        log_w = tsmc.mixture.mixture_log_weights(
            log_p + potential.log_phi - log_q, potential.log_phi
        )
        density = tsmc.mixture.PLAIN * log_p.exp() + (1 - tsmc.mixture.PLAIN) * log_q.exp()
        errors.append(
            (density * log_w.exp() - (log_p + potential.log_phi).exp()).abs().max().item()
        )
    return max(errors)


TABLE = table_world(2, 3)
CHECKS = {  # name: the largest error of all paths, or of another check
    "always": lambda: at_all_rules(*TABLE, thresholds=[1.0]),
    "adaptive": lambda: bias(*table_world(3, 3, 2), ess_threshold=ADAPTIVE),
    "at the end": lambda: at_all_rules(*TABLE, thresholds=[0.0]),
    "three tokens": lambda: at_all_rules(*table_world(3, 3, 2)),
    "network": lambda: bias(*gpt_neo_world(2, 3, 2)),
    "p^(1)": lambda: at_all_rules(STUDENT, *TABLE[1:], TABLE[0]),
    "prefix": lambda: at_all_rules(*guided(table_world(2, 3, 2))),
    "ended": ended_texts,
    "forced": forced_texts,
    "early": early_resampling,
    "mixture": mixture_of_p_and_q,
}


TAKE = "log_p, log_psi = log_p[parents], log_psi[parents]"
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
    "log psi kept at the end": ("always", "- step.log_q - log_psi", "- step.log_q"),
    "log psi kept before": ("always", "log_normaliser - log_psi", "log_normaliser"),
    "log psi not reordered": ("always", TAKE, "log_p = log_p[parents]"),
    "log p not reordered": ("p^(1)", TAKE, "log_psi = log_psi[parents]"),
    "tokens not reordered": ("always", "samples = tokens[parents]", "samples = tokens"),
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
    "no final samples": ("always", "in (tokens, samples)", "in (tokens, tokens)"),
    "f leaves no trace in the weights": ("prefix", "log_w = log_w + log_f", "pass"),
    "particles do not carry f": ("prefix", f"log_psi = log_psi + {ZERO_F}", "pass"),
    "f = 0 is divided out": ("prefix", ZERO_F, "log_f"),
    "f counts at T too": ("prefix", "if log_prefix and not is_last", "if log_prefix"),
    "ESS of the last increment": ("early", ESS, ESS.replace("log_weights", "log_w[None]")),
    "resampled at every step": ("early", "ess < threshold * particles", "ess < particles"),
    "no early resampling": ("early", "EARLY if sigma.log_prefix else 0.0", "0.0"),
}
OTHERS = {  # name: the check, the module, what is replaced, by what
    "phi^(m) without p^(0)": ("p^(1)", tsmc.sigma, "sequence_log_probs(self.base, tokens) +", ""),
    "phi^(m) without p^(m)": ("p^(1)", tsmc.sigma, "+ log_phi - log_p", "+ log_phi"),
    "log q not normalised": ("always", tsmc.proposal, "tokens] - log_normaliser", "tokens]"),
    "rows not put back": ("forced", tsmc.proposal, "[back] for", " for"),
    "no mark of a finished text": ("ended", decoder, MARK, f"0 * {MARK}"),
    "no mark in teacher forcing": ("forced", decoder, FORCED_MARK, f"0 * {FORCED_MARK}"),
    "states read behind the end": ("forced", decoder, "hidden = hidden.gather", "hidden.gather"),
    "states drawn behind it": ("forced", decoder, "before[:, :-1], hidden)", "hidden, hidden)"),
}
MIXED = "-torch.logaddexp(math.log1p(-plain) - log_weights, math.log(plain) - log_phi)"
OTHERS["weights of q alone"] = ("mixture", tsmc.mixture, MIXED, "log_weights")
OTHERS["shares exchanged"] = ("mixture", tsmc.mixture, "(plain) - log_phi", "(1 - plain) - log_phi")
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
