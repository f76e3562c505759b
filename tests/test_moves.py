"""Moves leave sigma as it is: all their decisions in enumerated worlds, and long chains."""

import types
from unittest import mock

import pytest
import torch
from torch import Tensor
from worlds import generator, gpt_neo_world, mutant, sequence_numbers, table_world

import tsmc.moves
import tsmc.runs
from tsmc import SCHEMES, Sigma, sample_proposal, sample_runs
from tsmc.exact import TableModel, TableTwist, Target, all_sequences
from tsmc.moves import move
from tsmc.proposal import DRAWN, token_log_probs
from twist.potential import effective_potential

EDGE = 1e-9  # of a probability: on either side of it the decision is another
TABLE, TABLE_TWIST, POTENTIAL = table_world(3, 3, seed=2)
NETWORK, NETWORK_TWIST, ITS_POTENTIAL = gpt_neo_world(2, 3, seed=2)
STUDENT = TableModel.random(3, 3, generator(3))
EFFECTIVE = Sigma(STUDENT, effective_potential(POTENTIAL, TABLE))
TARGET = Target(TABLE, POTENTIAL)
WORLDS = {  # sigma, twist, target
    "table": (Sigma(TABLE, POTENTIAL), TABLE_TWIST, TARGET),
    "network": (Sigma(NETWORK, ITS_POTENTIAL), NETWORK_TWIST, Target(NETWORK, ITS_POTENTIAL)),
    "effective": (EFFECTIVE, TABLE_TWIST, TARGET),
    "without a twist": (EFFECTIVE, None, TARGET),
}


def wrong_decisions(module: types.ModuleType, sigma: Sigma, twist, target: Target) -> float:
    """Share of the moves s -> s' at every t that detailed balance decides otherwise."""
    length = sigma.model.length
    sequences = target.tree.sequences()
    ranges = [torch.arange(size) for size in (len(sequences), len(sequences), length)]
    old, new, kept = torch.cartesian_prod(*ranges).T
    is_new = torch.arange(length) >= kept[:, None]
    is_possible = ((sequences[old] == sequences[new]) | is_new).all(1)
    old, new, kept, is_new = (x[is_possible] for x in (old, new, kept, is_new))
    log_p, log_q = token_log_probs(sigma.model, twist, sequences)  # [V^T, T]
    forth, back = (log_q[which].masked_fill(~is_new, 0).sum(1) for which in (new, old))
    log_sigma = target.log_sigma[-1]
    ratio = (log_sigma[new] + back - log_sigma[old] - forth).exp().clamp(max=1.0)
    log_phi = sigma.log_potential(sequences, log_p.sum(1))[old]

    def drawn(model, twist, rows, generator, given):
        tokens = torch.where(given == DRAWN, sequences[new], given)
        return sample_proposal(model, twist, rows, generator, given=tokens)

    wrong = torch.zeros(len(old), dtype=torch.bool)
    for is_accepted, limit in ((True, ratio * (1 - EDGE)), (False, ratio * (1 + EDGE))):
        numbers = iter([(kept[:, None] + 0.5) / length, limit[:, None]])
        with (
            mock.patch.object(module, "uniforms", lambda *_, numbers=numbers: next(numbers)),
            mock.patch.object(module, "sample_proposal", drawn),
        ):
            after = module.move(sigma, twist, sequences[old], log_phi, 1, generator(0))
        is_right = (after == sequences[new if is_accepted else old]).all(1)
        wrong |= ~is_right & (is_accepted | (limit < 1))
    return wrong.double().mean().item()


@pytest.mark.parametrize("name", WORLDS)
def test_every_decision_balances_sigma(name):
    assert wrong_decisions(tsmc.moves, *WORLDS[name]) == 0


PROPOSAL = "(new.log_p - new.log_q) - (log_p - log_q)"
MUTANTS = {
    "phi forgotten": (" + new_log_phi - log_phi", ""),
    "phi of the old sequence forgotten": ("new_log_phi - log_phi", "new_log_phi"),
    "proposal forgotten": (PROPOSAL, "new.log_p - log_p"),
    "prefix counted twice": (".masked_fill(~is_new, 0.0)", ".masked_fill(is_new, 0.0)"),
    "always taken": ("< log_ratio[:, None]", "< torch.inf + 0 * log_ratio[:, None]"),
    "the other way round": ("< log_ratio[:, None]", "< -log_ratio[:, None]"),
    "end given in place of the beginning": ("fill(is_new, DRAWN)", "fill(~is_new, DRAWN)"),
    "one token too many given": (">= kept", "> kept"),
    "one token too few given": ("fill(is_new, DRAWN)", "fill(is_new.roll(-1, 1), DRAWN)"),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_decision_is_noticed(change):
    assert wrong_decisions(mutant(tsmc.moves, change), *WORLDS["table"]) > 0.01


def assert_sigma(tokens: Tensor, shares: Tensor) -> None:
    """The frequencies of sequences [N, T] are `shares` [3^T] within 4.5 standard errors."""
    found = sequence_numbers(tokens, 3).bincount(minlength=len(shares)) / len(tokens)
    error = (shares * (1 - shares) / len(tokens)).sqrt()
    assert ((found - shares).abs() / error).max() < 4.5


def test_chains_sample_sigma():
    """From one sequence, whatever it is, to sigma; and from sigma one move stays there."""
    table, twist, potential = table_world(3, 3, seed=2, scale=0.5)
    sigma = Sigma(STUDENT, effective_potential(potential, table))
    sequences, shares = all_sequences(3, 3), Target(table, potential).log_sigma[-1].exp()
    log_p = token_log_probs(STUDENT, None, sequences)[0].sum(1)
    log_phi = sigma.log_potential(sequences, log_p)
    exact = torch.multinomial(shares, 4000, replacement=True, generator=generator(1))
    for start, times in ((torch.zeros(4000, dtype=torch.long), 250), (exact, 1)):
        moved = move(sigma, twist, sequences[start], log_phi[start], times, generator(2))
        assert_sigma(moved, shares)
        assert not torch.equal(moved, sequences[start])


def test_every_beginning_is_kept_as_often_and_unchanged():
    """t is uniform in 0..T-1: at least one token is drawn anew, and all may be."""
    sigma, twist, _ = WORLDS["table"]
    tokens, kept = all_sequences(3, 3).repeat(300, 1), []

    def drawn(model, twist, rows, generator, given):
        is_given = given != DRAWN
        kept.append(is_given.sum(1))
        assert (is_given[:, :-1] >= is_given[:, 1:]).all(), "a beginning"
        new = sample_proposal(model, twist, rows, generator, given=given)
        assert (new.tokens == tokens)[is_given].all()
        return new

    with mock.patch.object(tsmc.moves, "sample_proposal", drawn):
        move(sigma, twist, tokens, torch.zeros(len(tokens)), 1, generator(0))
    counts = kept[0].bincount(minlength=4)
    assert counts[3] == 0
    assert ((counts[:3] - 2700).abs() < 4.5 * (8100 * 2 / 9) ** 0.5).all()


def test_a_twist_that_rules_tokens_out_leaves_sigma():
    """After a first token behind which psi is zero, nothing can be proposed and nothing changes."""
    model, _, potential = table_world(3, 3, seed=2, scale=0.5)
    sigma, target = Sigma(model, potential), Target(model, potential)
    twist = TableTwist.ones(model)
    with torch.no_grad():
        twist.log_psi[int(model.states(torch.tensor([[1, 0]]))[0, 1])] = -torch.inf
    shares = target.log_sigma[-1].exp()
    start = torch.multinomial(shares, 20_000, replacement=True, generator=generator(1))
    log_phi = potential.log_phi[start]
    moved = move(sigma, twist, all_sequences(3, 3)[start], log_phi, 5, generator(2))
    assert_sigma(moved, shares)


def test_moves_separate_the_copies_of_a_population():
    """Only the samples change; they are moved with their own log phi."""
    model, twist, potential = table_world(5, 6, seed=1)
    sigma, calls = Sigma(model, potential), []

    def recorded(sigma, twist, tokens, log_phi, times, generator):
        calls.append((tokens, log_phi, times))
        return move(sigma, twist, tokens, log_phi, times, generator)

    rule = {"resample": SCHEMES["systematic"], "ess_threshold": 0.5}
    with mock.patch.object(tsmc.runs, "move", recorded):
        still, moved = (
            sample_runs(sigma, twist, 20, 30, generator(0), moves, **rule) for moves in (0, 3)
        )
    for name in ("tokens", "log_phi", "log_weights", "ancestors", "log_z", "ess"):
        assert torch.equal(getattr(still, name), getattr(moved, name)), name
    run = torch.arange(30)[:, None]
    assert torch.equal(still.samples, still.tokens[run, still.ancestors])
    ((tokens, log_phi, times),) = calls
    assert torch.equal(tokens, still.samples.flatten(0, 1)) and times == 3
    assert torch.equal(log_phi, potential(tokens))
    distinct = [sum(len(run.unique(dim=0)) for run in p.samples) for p in (still, moved)]
    assert distinct[1] > 1.2 * distinct[0]
