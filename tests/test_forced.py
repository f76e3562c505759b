"""Forced draws against enumeration: their density over all texts, their draws, their weights."""

import itertools
import math
import random

import pytest
import torch
from twist.factors import regex
from worlds import generator, letters, random_model

from distill import sample
from distill.pooled import forced
from distill.pooled.forced import forced_draws
from distill.pooled.pieces import find_pieces, weigh
from distill.pooled.pool import draw_round
from tinystories.decoder import NO_END, counted, is_end
from tsmc.exact import Target, Tree
from tsmc.sampler import Rule
from twist import TextPotential

END = 2
WORLDS = {  # hints of each factor, T, end
    "overlaps itself": ([[[1, 1]]], 5, NO_END),
    "overlap each other": ([[[0, 1]], [[1, 0]]], 5, NO_END),
    "one holds another": ([[[1, 0]], [[0]]], 4, NO_END),
    "one hint, three factors, and others": ([[[1]], [[1]], [[1], [2, 2]]], 4, NO_END),
    "no gap but for what overlaps": ([[[0, 1]], [[1, 2, 1], [0, 0, 2, 1]]], 5, NO_END),
    "with an end": ([[[1, 1], [0]]], 5, END),
    "more than the end": ([[[END, 1]], [[1, 0]]], 4, END),
    "two ends, and no room": ([[[1, 1]], [[0, 1], [1]]], 4, (0, END)),
}


def enumerated(model):
    """All texts [S, T] of a model, and log p(s_t | s_{0:t-1}) [S, T] of each."""
    tree = Tree(model)
    tokens = tree.sequences()[tree.prefix_log_q()[-1] > -math.inf]
    return tokens, model.log_probs(tokens)


def placements(hints, length):
    """All placements: the pieces (start, tokens, set of factors) of each, by where hints stand."""
    found = set()
    spots = [[(u, tuple(b)) for b in some for u in range(length - len(b) + 1)] for some in hints]
    for chosen in itertools.product(*spots):
        given: dict[int, int] = {}  # {t: token}
        agree = all(
            given.setdefault(u + i, token) == token for u, b in chosen for i, token in enumerate(b)
        )
        if not agree:
            continue
        groups: list[list[int]] = []  # [start, end, factors] of what overlaps
        for (u, b), j in sorted(zip(chosen, range(len(hints)), strict=True)):
            if groups and u < groups[-1][1]:
                groups[-1][1:] = max(groups[-1][1], u + len(b)), groups[-1][2] | 1 << j
            else:
                groups.append([u, u + len(b), 1 << j])
        found.add(
            frozenset((u, tuple(given[t] for t in range(u, end)), own) for u, end, own in groups)
        )
    return found


def density(model, hints):
    """q(s) [S] of all texts: the mean over placements of the chance that a draw becomes s."""
    tokens, log_p = enumerated(model)
    total, all_v = torch.zeros(len(tokens), dtype=torch.float64), 0.0
    for row in placements(hints, model.length):
        weight = log_v([piece[1:] for piece in row]).sum().exp()
        given = {u + i: token for u, b, _ in row for i, token in enumerate(b)}
        chance = torch.ones(len(tokens), dtype=torch.float64)
        has_ended = torch.zeros(len(tokens), dtype=torch.bool)
        for t in range(model.length):
            step = log_p[:, t].exp()
            if t in given:
                step = (tokens[:, t] == given[t]).double()
            chance *= step.masked_fill(has_ended, 1.0)
            has_ended |= is_end(tokens[:, t], model.end)
        total += weight * chance
        all_v += weight
    return total / all_v


def holds(tokens, hints, end):
    """Which of texts [S, T] hold a hint of each factor up to their end."""
    rows = [row[:n] for row, n in zip(tokens.tolist(), counted(tokens, end).sum(1), strict=True)]
    found = lambda row, b: any(row[u : u + len(b)] == b for u in range(len(row)))  # noqa: E731
    return torch.tensor([all(any(found(row, b) for b in some) for some in hints) for row in rows])


def log_v(pieces):
    """Weights [I], all different."""
    return -torch.tensor([len(b) + 0.1 * sum(b) + 0.37 * own for b, own in pieces]).double()


def random_world(seed):
    """One to three factors with one or two hints of up to three tokens, with an end or without."""
    source = random.Random(seed)
    factors = [range(source.randint(1, 2)) for _ in range(source.randint(1, 3))]
    hints = [[source.choices(range(3), k=source.randint(1, 3)) for _ in some] for some in factors]
    return hints, 5, source.choice([NO_END, END])


RANDOM = [world for world in map(random_world, range(60)) if placements(*world[:2])]


def test_density_is_that_of_all_placements_and_positive_wherever_the_hints_are():
    for hints, length, end in [*WORLDS.values(), *RANDOM]:
        model = random_model(length, end)
        texts, log_p = enumerated(model)
        found = find_pieces(hints, length)
        law = forced.Placements(found, log_v(found), len(hints), length)
        q = (law.log_ratio(texts, log_p, end) + log_p.sum(1)).exp()
        torch.testing.assert_close(q, density(model, hints), rtol=0, atol=1e-12)
        assert q.sum().item() == pytest.approx(1)
        assert (q[holds(texts, hints, end)] > 0).all(), hints
    assert len(RANDOM) > 40


@pytest.mark.learned
@pytest.mark.parametrize(("hints", "length", "end"), WORLDS.values(), ids=WORLDS)
def test_draws_have_this_density_and_are_weighted_by_it(hints, length, end, monkeypatch):
    """Plain and forced draws are p and q by their frequencies, of up to 243 texts."""
    monkeypatch.setattr(forced, "weigh", lambda _, pieces, *__: log_v(pieces))
    model, count, plain = random_model(length, end), 30000, 3000
    texts, log_p = enumerated(model)
    log_p, q = log_p.sum(1), density(model, hints)  # [S]

    def log_phi(tokens):
        """Zero without the hints, and otherwise different by text."""
        return (-tokens.double().std(1)).where(holds(tokens, hints, end), -math.inf)

    drawn = draw_round(model, None, log_phi, count, generator(2), hints)
    place = (drawn.tokens[:, None] == texts).all(2).int().argmax(1)  # [N]
    for part, chance in ((place[:plain], log_p.exp()), (place[plain:], q)):
        expected = len(part) * chance
        surprise = part.bincount(minlength=len(texts)) - expected
        assert (surprise[chance == 0] == 0).all()
        assert (surprise / (expected * (1 - chance)).clamp(min=1).sqrt()).abs().max() < 6
    mixture = 0.1 * log_p.exp() + 0.9 * q  # [S]
    wanted = (log_p + log_phi(texts) - mixture.log())[place]
    torch.testing.assert_close(drawn.log_weights, wanted, rtol=0, atol=1e-9)


def test_pieces_are_drawn_as_often_as_p_writes_them_rather_than_hints_apart():
    """A fifth goes to hints alike; a merged piece counts T = 4 times at most, as in two worlds."""
    model = random_model(4)
    model.table[:] = torch.tensor([0.0, -1.0, 3.0])  # whatever comes before
    p = model.table[0].softmax(0).tolist()
    either = p[0] + p[2]
    shares = [0.1 + 0.8 * p[i] / either for i in (0, 2)]
    for hints, expected in (
        ([[[0], [2]], [[2, 1]]], [*shares, 1, 1 / either]),
        ([[[2, 1]], [[1, 0]]], [1, 1, 4]),
    ):
        v = weigh(model, find_pieces(hints, 4), 2, generator(0)).exp()
        torch.testing.assert_close(v, torch.tensor(expected).double())


def test_what_the_model_cannot_write_has_weight_zero_and_hints_must_fit():
    model = random_model(4)
    model.table[:, 1] = -math.inf
    log_phi = lambda tokens: 0.0 * tokens.sum(1)  # noqa: E731
    drawn = draw_round(model, None, log_phi, 50, generator(0), [[[1, 0]]])
    assert ((drawn.log_weights == -math.inf) == (torch.arange(50) >= 5)).all()
    for hints in ([[[1, 1, 1]], [[0, 2]]], [[[1]], [[1] * 5]], [[[1] * 5]]):
        with pytest.raises(ValueError, match=r"^4 tokens have no room for the hints; give shorter"):
            forced_draws(model, hints, 10, generator(0))


@pytest.mark.learned
@pytest.mark.parametrize("words", [(["bb"],), (["bb", "ca"],), (["bb"], ["ca"], ["b"])], ids=str)
def test_without_a_pair_forced_draws_propose(words):
    """Texts that hold a word of each list, with the evidence and a probability of enumeration."""
    model, factors = random_model(5), []
    for some in words:
        factor = regex("|".join(some))
        factor.hints = some
        factors.append(factor)
    encode = lambda text: ["abc".index(c) for c in text.lower() if c.isalpha()]  # noqa: E731
    phi = TextPotential(factors, letters, model.prompt, encode=encode)
    target = Target(model, lambda tokens, log_p: phi(tokens))
    drawn = sample(model, phi, particles=40, runs=200, seed=1)
    assert drawn.population.tokens.shape == (200, 40, 5)
    evidence, share = drawn.evidence(), drawn.probability(lambda text: text[1] == "b")
    assert drawn.population.log_mean_z() == pytest.approx(evidence.value)
    assert abs(evidence.value - target.log_z) < 5 * evidence.std_error < 0.2
    assert abs(share.value - target.log_sigma[1][1].exp()) < 2.5 * share.half_width() < 0.2
    plain = TextPotential(factors, letters, model.prompt)  # without `encode` p^(0) proposes
    assert sample(model, plain, particles=40, runs=2, rule=Rule()).texts
