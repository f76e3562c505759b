"""Enumeration against sums by hand, on tables and on GPT-Neo, also of texts that end."""

import itertools
import math
from functools import partial

import pytest
import torch
from worlds import INF, ListedPotential, gpt_neo_world, hard_potential, table_world

from tinystories import decoder
from tsmc.exact import TableModel, TableTwist, Target, Tree, kl_divergence
from tsmc.proposal import proposal_log_probs, sequence_log_probs


def listed_by_hand(model, potential):
    """{sequence: (p, p * phi)} by walking the decoder; the first end follows an end for certain."""
    listed = {}
    for sequence in itertools.product(range(model.vocab_size), repeat=model.length):
        walk, p = model.decoder(1), 1.0
        for t, token in enumerate(sequence):
            if set(sequence[:t]) & set(model.end):
                p *= token == model.end[0]
            else:
                p *= model.head(walk.hidden).softmax(-1)[0, token].item()
            if t + 1 < model.length:
                walk.append(torch.tensor([token]))
        listed[sequence] = (p, p * potential(torch.tensor([sequence])).exp().item())
    return listed


WORLDS = [(table_world, 3, 3), (table_world, 2, 1), (table_world, 1, 3), (gpt_neo_world, 3, 3)]
WORLDS += [(partial(table_world, end=(1,)), 3, 4), (partial(table_world, end=(2, 1)), 3, 3)]


@pytest.mark.parametrize(("world", "vocab_size", "length"), WORLDS)
@torch.no_grad()
def test_all_levels_and_proposals_are_sums_by_hand(world, vocab_size, length, monkeypatch):
    monkeypatch.setattr(decoder, "MAX_LOGITS", 5 * vocab_size * length)
    model, twist, potential = world(vocab_size, length, seed=1)
    target = Target(model, potential)
    listed = listed_by_hand(model, potential)
    evidence = sum(joint for _, joint in listed.values())
    assert target.log_z == pytest.approx(math.log(evidence), abs=1e-12)
    for t in range(length + 1):
        for number, prefix in enumerate(itertools.product(range(vocab_size), repeat=t)):
            mine = [numbers for sequence, numbers in listed.items() if sequence[:t] == prefix]
            p, joint = (sum(column) for column in zip(*mine, strict=True))
            found = [target.log_p[t], target.log_sigma[t], target.log_psi[t]]
            found = [level[number].exp().item() for level in found]
            psi = joint / p if p > 0 else found[2]  # no matter where there is no text
            assert found == pytest.approx([p, joint / evidence, psi], abs=1e-12)
    log_q = target.tree.prefix_log_q(twist)[-1]
    is_possible = target.log_p[-1] > -INF
    q, sigma = (values[is_possible].exp().tolist() for values in (log_q, target.log_sigma[-1]))
    assert sum(q) == pytest.approx(1, abs=1e-12)
    wanted = sum(s * math.log(s / q_s) for s, q_s in zip(sigma, q, strict=True))
    assert target.kl_to(log_q) == pytest.approx(wanted, abs=1e-12)
    tokens, log_p = target.tree.sequences(), target.log_p[-1]
    found = [*proposal_log_probs(model, twist, tokens), sequence_log_probs(model, tokens)]
    torch.testing.assert_close(found, [log_p, log_q, log_p], rtol=0, atol=1e-12)


def test_mass_where_there_is_none():
    model, twist, _ = table_world(2, 3)
    target = Target(model, hard_potential({0: 0.0, 7: -2.0}))
    assert target.log_sigma[-1][1] == -INF
    assert math.isfinite(target.kl_to(target.tree.prefix_log_q(twist)[-1].detach()))
    optimal = TableTwist(target.optimal_log_psi())
    assert target.ctl_loss(optimal).item() == pytest.approx(0, abs=1e-12)
    log_q = proposal_log_probs(model, optimal, target.tree.sequences())[1]
    assert (log_q[1:7] == -INF).all()
    assert target.kl_to(log_q) == pytest.approx(0, abs=1e-12)
    assert kl_divergence(torch.tensor([0.0, -INF]), torch.tensor([0.0, -INF])) == 0
    for log_phi in (-INF, torch.nan, INF):
        with pytest.raises(ValueError, match="sigma does not exist"):
            Target(model, ListedPotential(torch.full((8,), log_phi).double(), 2))
    with pytest.raises(ValueError, match=r"2\^22 sequences cannot be enumerated"):
        Tree(TableModel(torch.zeros(1, 2), 22))
