"""The oracle against sums written out by hand, on tables and on GPT-Neo."""

import itertools
import math

import pytest
import torch
from worlds import ListedPotential, generator, gpt_neo_world, sequence_numbers, table_world

from tinystories.errors import InputError
from tsmc.exact import Target, Tree, all_sequences, kl_divergence
from tsmc.scoring import proposal_log_probs
from tsmc.table import TableModel, TableTwist, first_prefix, prefix_numbers

WORLDS = [(table_world, 3, 3), (table_world, 2, 1), (table_world, 1, 3), (gpt_neo_world, 3, 3), (gpt_neo_world, 2, 4)]


def listed_by_hand(model, potential, vocab_size):
    """{sequence: (p, p * phi)} by walking the decoder, one sequence at a time."""
    listed = {}
    for sequence in itertools.product(range(vocab_size), repeat=model.length):
        decoder, p = model.decoder(1), 1.0
        for t, token in enumerate(sequence):
            p *= decoder.logits.softmax(-1)[0, token].item()
            if t + 1 < model.length:
                decoder.extend(torch.tensor([token]))
        listed[sequence] = (p, p * potential(torch.tensor([sequence])).exp().item())
    return listed


@pytest.mark.parametrize(("world", "vocab_size", "length"), WORLDS)
@torch.no_grad()
def test_evidence_marginals_and_optimal_twist_match_sums_by_hand(world, vocab_size, length):
    model, _, potential = world(vocab_size, length, seed=1)
    target, listed = Target(model, potential, chunk=5), listed_by_hand(model, potential, vocab_size)
    evidence = sum(joint for _, joint in listed.values())
    assert target.log_z == pytest.approx(math.log(evidence), abs=1e-12)
    for t in range(length + 1):
        for number, prefix in enumerate(itertools.product(range(vocab_size), repeat=t)):
            mine = [(p, joint) for sequence, (p, joint) in listed.items() if sequence[:t] == prefix]
            p, joint = (sum(column) for column in zip(*mine, strict=True))
            assert target.log_p[t][number].exp().item() == pytest.approx(p, abs=1e-12)
            assert target.log_sigma[t][number].exp().item() == pytest.approx(joint / evidence, abs=1e-12)
            assert target.log_psi[t][number].exp().item() == pytest.approx(joint / p, abs=1e-12)
    for t, v in itertools.product(range(length), range(vocab_size)):
        share = sum(joint for sequence, (_, joint) in listed.items() if sequence[t] == v) / evidence
        assert target.token_marginals()[t, v].exp().item() == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("world", "vocab_size", "length"), WORLDS)
@torch.no_grad()
def test_divergences_of_a_proposal_in_both_directions(world, vocab_size, length):
    model, twist, potential = world(vocab_size, length, seed=2)
    target = Target(model, potential)
    log_q = target.tree.prefix_log_q(twist)[-1]
    assert log_q.logsumexp(0).item() == pytest.approx(0, abs=1e-12)
    sequences = target.tree.sequences()
    torch.testing.assert_close(log_q, proposal_log_probs(model, twist, sequences)[1], rtol=0, atol=1e-12)
    q, sigma = log_q.exp().tolist(), target.log_sigma[-1].exp().tolist()
    forward = sum(s * math.log(s / q_s) for s, q_s in zip(sigma, q, strict=True))
    backward = sum(q_s * math.log(q_s / s) for s, q_s in zip(sigma, q, strict=True))
    assert target.kl_to(log_q) == pytest.approx(forward, abs=1e-12)
    assert target.kl_from(log_q) == pytest.approx(backward, abs=1e-12)


@torch.no_grad()
def test_proposal_of_the_optimal_twist_is_sigma():
    model, _, potential = table_world(3, 4, seed=3)
    target = Target(model, potential)
    optimal = TableTwist(target.optimal_log_psi())
    torch.testing.assert_close(target.tree.prefix_log_q(optimal)[-1], target.log_sigma[-1], rtol=0, atol=1e-10)
    assert target.kl_to(target.tree.prefix_log_q(optimal)[-1]) == pytest.approx(0, abs=1e-10)
    assert target.ctl_loss(optimal).item() == pytest.approx(0, abs=1e-10)


def test_exact_ctl_gradient_is_sigma_minus_pi_at_every_prefix():
    model, twist, potential = table_world(2, 3, seed=4)
    target = Target(model, potential)
    target.ctl_loss(twist).backward()
    row = 0
    for t in range(1, 4):
        width = 2 ** (t - 1)
        log_psi = twist.log_psi.detach()[row : row + width].flatten()
        pi = target.log_p[t].exp() * log_psi.exp()
        wanted = pi / pi.sum() - target.log_sigma[t].exp()
        torch.testing.assert_close(twist.log_psi.grad[row : row + width].flatten(), wanted, rtol=0, atol=1e-12)
        row += width


def test_exact_ctl_gradient_matches_finite_differences():
    model, twist, potential = table_world(2, 2, seed=5)
    target = Target(model, potential)
    torch.autograd.gradcheck(lambda log_psi: target.ctl_loss(lambda h: log_psi[h[..., 0].long()]), twist.log_psi)


def test_mass_where_there_is_none():
    model, twist, _ = table_world(2, 2)
    log_phi = torch.tensor([0.0, -torch.inf, -torch.inf, -2.0]).double()
    target = Target(model, ListedPotential(log_phi, 2))
    assert target.log_sigma[-1][1] == -torch.inf
    log_q = target.tree.prefix_log_q(twist)[-1].detach()
    assert target.kl_from(log_q) == math.inf and math.isfinite(target.kl_to(log_q))
    optimal = TableTwist(target.optimal_log_psi())
    assert target.kl_to(target.tree.prefix_log_q(optimal)[-1].detach()) == pytest.approx(0, abs=1e-12)
    sequences = target.tree.sequences()
    assert proposal_log_probs(model, optimal, sequences)[1].tolist()[1:3] == [-math.inf, -math.inf]
    assert kl_divergence(torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, -torch.inf])) == 0


@pytest.mark.parametrize("log_phi", [-torch.inf, torch.nan, torch.inf])
def test_no_sigma_is_an_error(log_phi):
    model, _, _ = table_world(2, 2)
    with pytest.raises(InputError, match="sigma does not exist"):
        Target(model, ListedPotential(torch.full((4,), log_phi).double(), 2))


def test_too_many_sequences_are_refused():
    model = TableModel.random(3, 1, generator(0))
    model.length = 14
    with pytest.raises(InputError, match="cannot be enumerated"):
        Tree(model)


def test_table_of_the_wrong_size_is_refused():
    with pytest.raises(InputError, match=r"needs \[7, 2\]"):
        TableModel(torch.zeros(6, 2), 3)


def test_exact_samples_follow_sigma():
    model, _, potential = table_world(3, 2, seed=6)
    target = Target(model, potential)
    counts = sequence_numbers(target.sample(20000, generator(0)), 3).bincount(minlength=9)
    expected = 20000 * target.log_sigma[-1].exp()
    assert (counts - expected).square().div(expected).sum() < 26.12  # chi-square, 8 degrees of freedom, level 0.001


def test_prefixes_are_numbered_level_by_level():
    tokens = all_sequences(3, 3)
    numbers = prefix_numbers(tokens, 3)
    for t in range(3):
        assert numbers[:, t].unique().tolist() == list(range(first_prefix(3, t), first_prefix(3, t + 1)))
        assert torch.equal(
            numbers[:, t] - first_prefix(3, t), sequence_numbers(tokens[:, :t], 3) if t else numbers[:, 0]
        )


@torch.no_grad()
def test_table_decoder_agrees_with_teacher_forcing_under_reordering():
    model, _, _ = table_world(3, 4, seed=9)
    decoder, source = model.decoder(6), generator(1)
    tokens = torch.empty(6, 0, dtype=torch.long)
    for t in range(4):
        step = torch.randint(3, (6,), generator=source)
        log_p, logits, hidden = model.log_probs(torch.cat([tokens, step[:, None]], 1))
        torch.testing.assert_close(decoder.logits, logits[:, -1])
        torch.testing.assert_close(decoder.states, hidden[:, -1])
        torch.testing.assert_close(log_p[:, -1], decoder.logits.log_softmax(-1).gather(1, step[:, None])[:, 0])
        ancestors = torch.randint(6, (6,), generator=source)
        tokens = torch.cat([tokens, step[:, None]], 1)[ancestors]
        if t < 3:
            decoder.extend(tokens[:, -1], ancestors)


@torch.no_grad()
def test_a_million_sequences():
    model = TableModel.random(10, 6, generator(0))
    log_phi = -torch.randn(10**6, dtype=torch.float64, generator=generator(1)).abs()
    target = Target(model, ListedPotential(log_phi, 10))
    assert target.log_z == pytest.approx((target.log_p[-1] + log_phi).logsumexp(0).item(), abs=1e-10)
    assert len(target.optimal_log_psi()) == 111111
