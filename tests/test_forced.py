"""Forced draws against enumeration: their density over all texts, their draws, their weights."""

import itertools
import math

import pytest
import torch
from worlds import generator, letters, random_model

from distill import sample
from distill.pooled.forced import forced_draws
from distill.pooled.pool import draw_round
from tinystories.decoder import NO_END, is_end
from tsmc.exact import Target, Tree
from tsmc.sampler import Rule
from twist import TextPotential
from twist.factors import regex

END = 2
WORLDS = {  # hints by turns, T, end
    "overlaps itself": ([[[1, 1]]], 5, NO_END),
    "overlap each other": ([[[0, 1], [1, 0]]], 5, NO_END),
    "three, by turns with one": ([[[1], [2], [0]], [[2, 2]]], 4, NO_END),
    "no gap": ([[[0, 1], [2, 1, 1]]], 5, NO_END),
    "with an end": ([[[1, 1]], [[0]]], 5, END),
    "more than the end": ([[[END, 1], [0]]], 4, END),
    "two ends, and no room": ([[[1, 1], [0, 1]]], 4, (0, END)),
}


def enumerated(model):
    """All texts [S, T] of a model, and log p(s_t | s_{0:t-1}) [S, T] of each."""
    tree = Tree(model)
    tokens = tree.sequences()[tree.prefix_log_q()[-1] > -math.inf]
    return tokens, model.log_probs(tokens)[0]


def density(model, hints):
    """q(s) [S] of all texts: the mean over placements of the chance that a draw becomes s."""
    tokens, log_p = enumerated(model)
    chances = []
    for starts in itertools.product(*(range(model.length - len(hint) + 1) for hint in hints)):
        forced = {}  # {t: token}
        for start, hint in zip(starts, hints, strict=True):
            forced |= {start + i: token for i, token in enumerate(hint)}
        if len(forced) < sum(map(len, hints)):  # they overlap
            continue
        chance = torch.ones(len(tokens), dtype=torch.float64)
        has_ended = torch.zeros(len(tokens), dtype=torch.bool)
        for t in range(model.length):
            step = log_p[:, t].exp()
            if t in forced:
                step = (tokens[:, t] == forced[t]).double()
            chance *= step.masked_fill(has_ended, 1.0)
            has_ended |= is_end(tokens[:, t], model.end)
        chances.append(chance)
    return torch.stack(chances).mean(0)


@pytest.mark.learned
@pytest.mark.parametrize(("turns", "length", "end"), WORLDS.values(), ids=WORLDS)
def test_draws_have_the_density_of_all_placements_and_are_weighted_by_it(turns, length, end):
    """Plain and forced draws are p and q by their frequencies, of up to 243 texts."""
    model, count, plain = random_model(length, end), 30000, 3000
    texts, log_p = enumerated(model)
    log_p, q = log_p.sum(1), torch.stack([density(model, hints) for hints in turns]).mean(0)  # [S]
    assert q.sum().item() == pytest.approx(1)

    def log_phi(tokens):
        """Zero without the first token of the first hint, and otherwise different by text."""
        return (-tokens.double().std(1)).where((tokens == turns[0][0][0]).any(1), -math.inf)

    drawn = draw_round(model, None, log_phi, count, generator(2), turns)
    place = (drawn.tokens[:, None] == texts).all(2).int().argmax(1)  # [N]
    for part, chance in ((place[:plain], log_p.exp()), (place[plain:], q)):
        expected = len(part) * chance
        surprise = part.bincount(minlength=len(texts)) - expected
        assert (surprise[chance == 0] == 0).all()
        assert (surprise / (expected * (1 - chance)).clamp(min=1).sqrt()).abs().max() < 6
    mixture = 0.1 * log_p.exp() + 0.9 * q  # [S]
    wanted = (log_p + log_phi(texts) - mixture.log())[place]
    torch.testing.assert_close(drawn.log_weights, wanted, rtol=0, atol=1e-9)


def test_what_the_model_cannot_write_has_weight_zero_and_hints_must_fit():
    model = random_model(4)
    model.table[:, 1] = -math.inf
    log_phi = lambda tokens: 0.0 * tokens.sum(1)  # noqa: E731
    drawn = draw_round(model, None, log_phi, 50, generator(0), [[[1, 0]]])
    assert ((drawn.log_weights == -math.inf) == (torch.arange(50) >= 5)).all()
    for hints in ([[1, 1, 1], [0, 2]], [[1]] * 7):
        with pytest.raises(ValueError, match=r"hints of .* at most 6 hints and 4 tokens$"):
            forced_draws(model, [hints], 10, generator(0))


@pytest.mark.learned
@pytest.mark.parametrize("words", [(["bb"],), (["bb", "ca"],), (["bb"], ["ca"])], ids=str)
def test_without_a_pair_forced_draws_propose(words):
    """Texts that hold a word of each list, with the evidence and a probability of enumeration."""
    model, factors = random_model(5), []
    for some in words:
        factor = regex("|".join(some))
        factor.hints = some
        factors.append(factor)
    encode = lambda text: ["abc".index(letter) for letter in text.replace(" ", "")]  # noqa: E731
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
