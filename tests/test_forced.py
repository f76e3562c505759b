"""Forced draws against enumeration: their density over all texts, their draws, their weights."""

import itertools
import math

import pytest
import torch
from worlds import generator, gpt_neo_world, mutant

import twist.forced
from tinystories.decoder import NO_END
from tinystories.errors import InputError
from tsmc.exact import TableModel, all_sequences
from twist.forced import forced_draws, forced_log_ratio
from twist.pool import draw_round

END = 2
WORLDS = {  # hints, T, end
    "three tokens": ([[0, 1, 2]], 5, NO_END),
    "overlaps itself": ([[1, 1]], 5, NO_END),
    "overlap each other": ([[0, 1], [1, 0]], 5, NO_END),
    "one inside the other": ([[1], [1, 1]], 4, NO_END),
    "three": ([[1], [2], [0]], 4, NO_END),
    "no gap": ([[0, 1], [2, 1, 1]], 5, NO_END),
    "with an end": ([[1, 1]], 5, END),
    "two with an end": ([[1], [0, 1]], 5, END),
    "the end is forced": ([[1], [0, END]], 4, END),
    "more than the end": ([[END, 1], [0]], 4, END),
}
EACH = pytest.mark.parametrize(("hints", "length", "end"), WORLDS.values(), ids=WORLDS)
MUTANTS = {
    "hints overlap": ("[:, : -len(hint)]", "[:, 1 : 1 - len(hint) or None]"),
    "one order only": ("if chosen >> j & 1:", "if chosen >> j == 1:"),
    "one place only": ("last.logcumsumexp(1)", "last"),
    "orders do not count": ("math.perm(", "math.comb("),
    "a text has no end": ("(is_met | is_behind.unfold(1, len(hint), 1))", "is_met"),
}


def table_model(length, end):
    """A random model of three tokens."""
    model = TableModel.random(3, length, generator(0)).requires_grad_(False)
    model.end = end
    return model


def enumerated(model):
    """All texts [S, T] of a model, and log p(s_t | s_{0:t-1}) [S, T] of each."""
    tokens = all_sequences(3, model.length, torch.device("cpu"))
    has_ended = tokens[:, :-1] == model.end
    tokens = tokens[(~has_ended | (tokens[:, 1:] == model.end)).all(1)]
    return tokens, model.log_probs(tokens)[0]


def placements(hints, length):
    """{t: token} of all places that are forced, for every placement without an overlap."""
    for starts in itertools.product(*(range(length - len(hint) + 1) for hint in hints)):
        forced = {}
        for start, hint in zip(starts, hints, strict=True):
            forced |= {start + i: token for i, token in enumerate(hint)}
        if len(forced) == sum(map(len, hints)):
            yield forced


def density(model, hints):
    """q(s) [S] of all texts: the mean over placements of the chance that a draw becomes s."""
    tokens, log_p = enumerated(model)
    chances = []
    for forced in placements(hints, model.length):
        chance = torch.ones(len(tokens), dtype=torch.float64)
        has_ended = torch.zeros(len(tokens), dtype=torch.bool)
        for t in range(model.length):
            step = log_p[:, t].exp()
            if t in forced:
                step = (tokens[:, t] == forced[t]).double()
            chance *= step.masked_fill(has_ended, 1.0)
            has_ended |= tokens[:, t] == model.end
        chances.append(chance)
    return torch.stack(chances).mean(0)


def error(module, hints, length, end):
    """The largest error of q by a module, of all texts and of their sum."""
    model = table_model(length, end)
    tokens, log_p = enumerated(model)
    found = (module.forced_log_ratio(tokens, log_p, hints, end) + log_p.sum(1)).exp()
    return max((found - density(model, hints)).abs().max().item(), abs(found.sum().item() - 1))


@EACH
def test_the_density_is_that_of_all_placements(hints, length, end):
    assert error(twist.forced, hints, length, end) < 1e-12


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_the_density_of_a_mutant_is_wrong(change):
    broken = mutant(twist.forced, change)
    assert max(error(broken, *world) for world in WORLDS.values()) > 0.01


@EACH
def test_draws_have_their_density_and_weights_are_unbiased(hints, length, end):
    """Frequencies of up to 243 texts; sum of w u against N sum p phi u; w <= 10 phi."""
    model, count, plain = table_model(length, end), 30000, 3000
    texts, log_p = enumerated(model)
    log_p = log_p.sum(1)  # [S]

    def log_phi(tokens):
        """Zero without the first token of the first hint, and otherwise different by text."""
        return (-tokens.double().std(1)).where((tokens == hints[0][0]).any(1), -math.inf)

    drawn = draw_round(model, None, log_phi, count, generator(2), hints)
    place = (drawn.tokens[:, None] == texts).all(2).int().argmax(1)  # [N]
    for part, q in ((place[:plain], log_p.exp()), (place[plain:], density(model, hints))):
        expected = len(part) * q
        surprise = part.bincount(minlength=len(texts)) - expected
        assert (surprise[q == 0] == 0).all()
        assert (surprise / (expected * (1 - q)).clamp(min=1).sqrt()).abs().max() < 4.5
    mixture = 0.1 * log_p.exp() + 0.9 * density(model, hints)  # [S]
    wanted = (log_p + log_phi(texts) - mixture.log())[place]
    torch.testing.assert_close(drawn.log_weights, wanted, rtol=0, atol=1e-9)
    assert (drawn.log_weights <= log_phi(drawn.tokens) + math.log(10) + 1e-9).all()
    truth = (log_p + log_phi(texts)).exp()
    for u in (1.0 + 0 * texts[:, 0], texts[:, -1].double(), (texts[:, 0] == 1).double()):
        terms = drawn.log_weights.exp() * u[place]
        variance = terms[:plain].var() * plain + terms[plain:].var() * (count - plain)
        assert abs(terms.sum() - count * (truth * u).sum()) < 4 * variance.sqrt()
        assert 4 * variance.sqrt() < 0.1 * count * truth.sum()


def test_what_the_model_cannot_write_has_weight_zero():
    model = table_model(4, NO_END)
    model.table[:, 1] = -math.inf
    one = lambda tokens: torch.zeros(len(tokens))  # noqa: E731
    drawn = draw_round(model, None, one, 50, generator(0), [[1, 0]])
    is_forced = torch.arange(50) >= 5
    assert ((drawn.log_weights == -math.inf) == is_forced).all()


def test_forced_tokens_are_read_by_a_network():
    model = gpt_neo_world(5, 6)[0]
    hints = [[3, 3], [4]]
    tokens, log_ratio = forced_draws(model, hints, 200, generator(0))
    log_p = model.log_probs(tokens)[0]
    log_q = forced_log_ratio(tokens, log_p, hints, NO_END) + math.log(0.9)
    wanted = log_q.logaddexp(torch.full_like(log_q, math.log(0.1)))
    torch.testing.assert_close(log_ratio, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("hints", [[[1, 1, 1], [0, 2]], [[1]] * 7])
def test_hints_that_do_not_fit_are_refused(hints):
    with pytest.raises(
        InputError, match=f"^{len(hints)} hints of .* at most 6 hints and 4 tokens$"
    ):
        forced_draws(table_model(4, NO_END), hints, 10, generator(0))
