"""Moves leave sigma as it is: every decision that they can take in worlds that are enumerated, mutants, and long chains."""

import inspect
import types
from unittest import mock

import pytest
import torch
from torch import Tensor
from worlds import generator, gpt_neo_world, sequence_numbers, table_world

import tsmc.moves
from tsmc import SCHEMES, Chunks, Sigma, sample_runs
from tsmc.exact import Target
from tsmc.moves import move
from tsmc.scoring import token_log_probs
from tsmc.table import TableModel, TableTwist
from tsmc.trajectories import trajectories
from twist.potential import base_potential, effective_potential

EDGE = 1e-9  # of a probability: on either side of it a decision is another


def every_sequence(vocab_size: int, length: int) -> Tensor:
    """All sequences [V^T, T] in lexicographic order."""
    return torch.cartesian_prod(*[torch.arange(vocab_size)] * length).view(-1, length)


def worlds() -> list[tuple]:
    """(sigma, twist, target) of a table, of a network, and of a distilled model under its effective potential."""
    table, table_twist, potential = table_world(3, 3, seed=2)
    network, network_twist, its_potential = gpt_neo_world(2, 3, seed=2)
    student = Sigma(TableModel.random(3, 3, generator(3)), effective_potential(potential, table))
    return [
        (Sigma(table, base_potential(potential)), table_twist, Target(table, potential)),
        (Sigma(network, base_potential(its_potential)), network_twist, Target(network, its_potential)),
        (student, table_twist, Target(table, potential)),
        (student, None, Target(table, potential)),
    ]


def wrong_decisions(module: types.ModuleType, sigma: Sigma, twist, target: Target) -> float:
    """Share of the moves s -> s' at every t that are decided otherwise than detailed balance asks for."""
    vocab_size, length = sigma.model.vocab_size, sigma.model.length
    sequences = every_sequence(vocab_size, length)
    number = len(sequences)
    old, new, kept = (x.flatten() for x in torch.meshgrid(*map(torch.arange, (number, number, length)), indexing="ij"))
    same_prefix = ((sequences[old] == sequences[new]) | (torch.arange(length) >= kept[:, None])).all(1)
    old, new, kept = old[same_prefix], new[same_prefix], kept[same_prefix]
    is_new = torch.arange(length) >= kept[:, None]
    log_q = token_log_probs(sigma.model, twist, sequences)[1]  # [V^T, T]
    there, back = (log_q[which].masked_fill(~is_new, 0).sum(1) for which in (new, old))
    log_sigma = target.log_sigma[-1]
    ratio = (log_sigma[new] + back - log_sigma[old] - there).exp().clamp(max=1.0)
    wrong = torch.zeros(len(old), dtype=torch.bool)
    log_p = token_log_probs(sigma.model, None, sequences)[0].sum(1)
    log_phi = sigma.log_potential(sequences, log_p)[old]

    def drawn(model, twist, uniform, keep_hidden, forced):
        expected = sequences[old].masked_fill(is_new, -1)
        assert torch.equal(forced, expected) or module is not tsmc.moves
        return trajectories(model, twist, uniform, keep_hidden, sequences[new])

    for accepted, limit in ((True, ratio * (1 - EDGE)), (False, ratio * (1 + EDGE))):
        numbers = iter([(kept[:, None] + 0.5) / length, torch.rand(length * len(old), 1), limit[:, None]])
        with (
            mock.patch.object(module, "uniforms", lambda *_, numbers=numbers: next(numbers)),
            mock.patch.object(module, "trajectories", drawn),
        ):
            after = module.move(sigma, twist, sequences[old], log_phi, 1, generator(0))
        is_right = (after == sequences[new if accepted else old]).all(1)
        wrong |= ~is_right & (accepted | (limit < 1))
    return wrong.double().mean().item()


@pytest.mark.parametrize("world", worlds(), ids=["table", "network", "effective", "without a twist"])
def test_every_decision_balances_sigma(world):
    assert wrong_decisions(tsmc.moves, *world) == 0


PROPOSAL = "(new.log_p - new.log_q) - (log_p - log_q)"
MUTANTS = {
    "phi forgotten": (" + new_log_phi - log_phi", ""),
    "phi of the old sequence forgotten": ("new_log_phi - log_phi", "new_log_phi"),
    "proposal forgotten": (PROPOSAL, "new.log_p - log_p"),
    "prefix counted twice": (".masked_fill(~is_new, 0.0)", ".masked_fill(is_new, 0.0)"),
    "always taken": ("< log_ratio[:, None]", "< torch.inf + 0 * log_ratio[:, None]"),
    "the other way round": ("< log_ratio[:, None]", "< -log_ratio[:, None]"),
}


@pytest.mark.parametrize("right, wrong", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_decision_is_noticed(right, wrong):
    source, module = inspect.getsource(tsmc.moves), types.ModuleType("mutant")
    assert source.count(right) == 1, "the expression is no longer there"
    exec(compile(source.replace(right, wrong), "mutant", "exec"), module.__dict__)
    assert wrong_decisions(module, *worlds()[0]) > 0.01


def frequencies(tokens: Tensor, vocab_size: int) -> Tensor:
    """Share [V^T] of each sequence among tokens [N, T]."""
    return sequence_numbers(tokens, vocab_size).bincount(minlength=vocab_size ** tokens.shape[1]) / len(tokens)


@pytest.mark.parametrize("generation", [0, 1])
def test_chains_sample_sigma(generation):
    """From one sequence, whatever it is, to sigma; and from sigma one move stays there. Within 4.5 standard errors."""
    table, twist, potential = table_world(3, 3, seed=2, scale=0.5)
    sigma, target, rows = Sigma(table, base_potential(potential)), Target(table, potential), 20_000
    if generation == 1:
        sigma = Sigma(TableModel.random(3, 3, generator(3)), effective_potential(potential, table))
    sequences, shares = every_sequence(3, 3), target.log_sigma[-1].exp()
    log_phi = sigma.log_potential(sequences, token_log_probs(sigma.model, None, sequences)[0].sum(1))
    exact = torch.multinomial(shares, rows, replacement=True, generator=generator(1))
    for start, times in ((torch.zeros(rows, dtype=torch.long), 250 if generation else 60), (exact, 1)):
        moved = move(sigma, twist, sequences[start], log_phi[start], times, generator(2))
        error = (frequencies(moved, 3) - shares).abs() / (shares * (1 - shares) / rows).sqrt()
        assert error.max() < 4.5
        assert not torch.equal(moved, sequences[start])


def test_every_beginning_is_kept_as_often_and_unchanged():
    """t is uniform in 0..T-1: at least one token is drawn anew, and all may be."""
    sigma, twist, _ = worlds()[0]
    tokens, kept = every_sequence(3, 3).repeat(300, 1), []

    def drawn(model, twist, uniform, keep_hidden, forced):
        kept.append((forced >= 0).sum(1))
        assert ((forced == tokens) | (forced == -1)).all() and (forced[:, 1:] < 0)[forced[:, :-1] < 0].all()
        return trajectories(model, twist, uniform, keep_hidden, forced)

    with mock.patch.object(tsmc.moves, "trajectories", drawn):
        move(sigma, twist, tokens, torch.zeros(len(tokens)), 1, generator(0))
    counts = kept[0].bincount(minlength=4)
    assert counts[3] == 0 and ((counts[:3] - len(tokens) / 3).abs() < 4.5 * (len(tokens) * 2 / 9) ** 0.5).all()


def test_a_twist_that_rules_tokens_out_leaves_sigma():
    """Behind a first token after which psi is zero everywhere nothing can be proposed; what is there stays, however often."""
    model, _, potential = table_world(3, 3, seed=2, scale=0.5)
    sigma, target, rows = Sigma(model, base_potential(potential)), Target(model, potential), 60_000
    twist = TableTwist.ones(model)
    with torch.no_grad():
        twist.log_psi[int(model.states(torch.tensor([[1, 0]]))[0, 1])] = -torch.inf
    sequences, shares = every_sequence(3, 3), target.log_sigma[-1].exp()
    start = torch.multinomial(shares, rows, replacement=True, generator=generator(1))
    log_phi = sigma.log_potential(sequences, None)
    moved = move(sigma, twist, sequences[start], log_phi[start], 5, generator(2))
    error = (frequencies(moved, 3) - shares).abs() / (shares * (1 - shares) / rows).sqrt()
    assert error.max() < 4.5


def test_what_is_moved_is_what_was_resampled():
    """The samples of a population with their own log phi, not those of the weighted particles."""
    model, twist, potential = table_world(5, 6, seed=1)
    sigma, given = Sigma(model, base_potential(potential)), []

    def noted(sigma, twist, tokens, log_phi, times, generator):
        given.append((tokens, log_phi, times))
        return tokens

    with mock.patch.object(tsmc.moves, "move", noted):
        population = sample_runs(sigma, twist, 20, Chunks(30, 30, generator), SCHEMES["systematic"], 0.5, 4)
    tokens, log_phi, times = given[0]
    index = population.ancestors[..., None].expand_as(population.tokens)
    assert torch.equal(tokens, population.tokens.gather(1, index).flatten(0, 1)) and times == 4
    assert torch.equal(log_phi, sigma.log_potential(tokens, None))


def test_moves_part_the_copies_of_a_population():
    """The weighted particles, their evidence and the stream before the moves stay; the samples differ from one another."""
    model, twist, potential = table_world(5, 6, seed=1)
    sigma = Sigma(model, base_potential(potential))

    def drawn(moves: int):
        return sample_runs(sigma, twist, 20, Chunks(30, 10, generator), SCHEMES["systematic"], 0.5, moves)

    still, moved = drawn(0), drawn(3)
    for name in ("tokens", "log_phi", "log_weights", "ancestors", "log_z", "ess"):
        assert torch.equal(getattr(still, name), getattr(moved, name)), name
    assert torch.equal(still.samples, still.tokens.gather(1, still.ancestors[..., None].expand_as(still.tokens)))

    def distinct(population) -> int:
        return sum(len(run.unique(dim=0)) for run in population.samples)

    assert distinct(moved) > 1.2 * distinct(still)
