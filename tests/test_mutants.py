"""Code broken on purpose, each break noticed by a check that the right code passes.

A mutant is the source of a module with one expression replaced, so it follows every change of the
code.
"""

import pytest
import torch
import worlds
from worlds import ADAPTIVE, bias, generator, gpt_neo_world, mutant, table_world, tiny_gpt_neo

import tinystories.decoder
import tsmc.proposal
import tsmc.sampler
from tsmc.exact import TableModel, Target
from tsmc.trace import Trace
from twist.potential import effective_potential


def every_step(sampler) -> float:
    return bias(*table_world(3, 3, seed=2), module=sampler)


def adaptive(sampler) -> float:
    return bias(*table_world(3, 3, seed=2), ess_threshold=ADAPTIVE, module=sampler)


def on_gpt_neo(sampler) -> float:
    return bias(*gpt_neo_world(2, 3, seed=2), module=sampler)


def generation_one(sampler) -> float:
    base, twist, potential = table_world(2, 3, seed=2)
    student = TableModel.random(2, 3, generator(3))
    world = (student, twist, effective_potential(potential, base))
    return bias(*world, target=Target(base, potential), module=sampler)


def conditional(sampler) -> float:
    return abs(worlds.mean_inverse(*table_world(2, 3, seed=2), 2, module=sampler) - 1)


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


def given_tokens(proposal) -> float:
    """Largest error of the log-probs of sequences, a third of whose tokens are given."""
    model, twist, _ = table_world(3, 4, seed=1)
    source, decoder, steps = generator(0), model.decoder(40), []
    given = torch.randint(3, (40, 4), generator=source)
    given[torch.rand(40, 4, generator=source) > 1 / 3] = proposal.DRAWN
    for t in range(4):
        uniform = torch.rand(40, 1, generator=source).double()
        steps.append(proposal.propose(model, decoder, twist, uniform, given[:, t]))
        decoder.extend(steps[-1].tokens)
    tokens = torch.stack([step.tokens for step in steps], 1)
    assert len(tokens.unique(dim=0)) > 10  # of 81 sequences
    log_p, logits, hidden = model.log_probs(tokens)
    log_q = (logits + twist(hidden)).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    errors = [(tokens - given)[given >= 0]]
    for t, step in enumerate(steps):
        errors += [step.log_p - log_p[:, t], step.log_q - log_q[:, t]]
    return max(error.abs().max().item() for error in errors)


def shared_rows(decoder) -> float:
    """Largest error of the logits of a slice of rows, many of which share a state."""
    decoder.GROUP = 1
    network = tiny_gpt_neo(11, seed=3).double()
    model = tinystories.decoder.Conditional(network, torch.tensor([4, 2, 7]), 8)
    rows = decoder.Decoder(network, model.prompt, 9, 8)
    source, tokens, error = generator(4), torch.empty(9, 0, dtype=torch.long), 0.0
    for t in range(7):
        ancestors = torch.randint(9, (9,), generator=source)
        step = torch.randint(2, (9,), generator=source)
        rows.extend(step, ancestors)
        tokens = torch.cat([tokens[ancestors], step[:, None]], 1)
        wanted = model.log_probs(torch.cat([tokens, tokens[:, :1]], 1))[1][:, -1]
        for part in (slice(0, 9), slice(3, 9), slice(2 + t % 4, 8)):
            difference = rows.evaluate(network.head, part) - wanted[part]
            error = max(error, difference.abs().max().item())
    return error


SAMPLER = [every_step, adaptive, on_gpt_neo, generation_one, conditional, sample_size]
SOURCE = dict.fromkeys(SAMPLER, tsmc.sampler)
SOURCE |= {given_tokens: tsmc.proposal, shared_rows: tinystories.decoder}
EVIDENCE = "evidence = log_z + log_mean_exp(log_weights)"
GAINED = "log_z = torch.where(is_due, evidence, log_z)"
ESS = "ess = effective_sample_size(log_weights)"
KEPT = "log_weights = torch.where(is_due[:, None], 0.0, log_weights)"
EXTEND = ", (particles * run + ancestors).flatten())"
DRAW = "resample(normalise(log_weights), generator)"
BARREN = "normalise(log_weights.index_fill(1, torch.tensor([0]), -torch.inf))"
LAST = "step.log_p + log_phi - step.log_q"
MUTANTS = {  # name: the check that notices it, what is replaced, by what
    "final correction dropped": (every_step, LAST, "step.log_normaliser"),
    "log psi kept at the end": (every_step, "- step.log_q - log_psi", "- step.log_q - 0 * log_psi"),
    "log psi kept before": (every_step, "log_normaliser - log_psi", "log_normaliser - 0 * log_psi"),
    "log psi not reordered": (every_step, "log_psi = log_psi[run, ancestors]", "pass"),
    "log p not reordered": (generation_one, "log_p = log_p[run, ancestors]", "pass"),
    "tokens not reordered": (every_step, " tokens = tokens[run, ancestors]", " pass"),
    "table position not reordered": (every_step, EXTEND, ")"),
    "cache not reordered": (on_gpt_neo, EXTEND, ")"),
    "ancestors of another run": (every_step, "particles * run + ancestors", "ancestors"),
    "log K dropped": (every_step, EVIDENCE, "evidence = log_z + log_weights.logsumexp(-1)"),
    "every-step evidence": (adaptive, GAINED, "log_z = log_z + log_mean_exp(log_w)"),
    "evidence of last weights": (adaptive, EVIDENCE, EVIDENCE.replace("weights", "w")),
    "weights kept after resampling": (every_step, KEPT, "pass"),
    "weights dropped without it": (adaptive, KEPT, "log_weights = 0.0 * log_weights"),
    "no resampling at the end": (adaptive, " | is_last", ""),
    "ESS of the last increment": (sample_size, ESS, "ess = effective_sample_size(log_w)"),
    "resampled at every step": (sample_size, "ess_threshold * particles)", "particles)"),
    "other weights resampled": (every_step, DRAW, DRAW.replace("weights)", "weights).square()")),
    "no final samples": (every_step, "samples = tokens[run, ancestors]", "samples = tokens"),
    "reference's ancestor not pinned": (conditional, "ancestors[:, 0] = 0", "pass"),
    "reference without offspring": (conditional, "normalise(log_weights)", BARREN),
    "reference's tokens drawn anew": (conditional, "given[:, 0] = reference", "pass"),
    "reference's token of another step": (conditional, "given[..., t]", "given[..., 0]"),
    "given tokens drawn": (given_tokens, "given == DRAWN", "given == given"),
    "probability of the drawn token": (given_tokens, "place = tokens", "place = 0 * tokens"),
    "states not those of rows": (shared_rows, "states)[state_of]", "states)[0 * state_of]"),
    "slice of other rows": (shared_rows, "self.state_of[rows]", "self.state_of.roll(1)[rows]"),
    "states of a slice mixed up": (shared_rows, "[states])[place]", "[state_of])[place]"),
    "rows not reordered": (shared_rows, "else self.state_of[ancestors]", "else self.state_of"),
    "parents not merged apart": (shared_rows, "state_of * vocab_size + tokens", "tokens"),
    "history of other rows": (shared_rows, "reorder(parents)", "reorder(parents.flip(0))"),
}


@pytest.mark.parametrize("check", SOURCE, ids=lambda check: check.__name__)
def test_the_code_passes(check, monkeypatch):
    monkeypatch.setattr(tinystories.decoder, "GROUP", 1)
    assert check(SOURCE[check]) < 1e-12


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name):
    check, *change = MUTANTS[name]
    assert check(mutant(SOURCE[check], change)) > 1e-3
