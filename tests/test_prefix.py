"""Prefix parts: unbiased over all paths, one mutant a line; ready and wrong ones."""

import itertools
import math

import pytest
import torch
import worlds
from worlds import ADAPTIVE, generator, mutant, sequence_numbers, table_world, tiny_conditional

import tsmc.sampler
from eval.scorers.potentials import make_factors
from tinystories.errors import InputError
from tsmc import Sigma
from tsmc.runs import Streams, draw_population
from twist import Factor, TextPotential
from twist.potential import check_potential

INF, PROMPT = math.inf, torch.tensor([1, 2])


def dead_world():
    """Model, twist, phi = 0 on all texts that begin with 0, 1, and a random f that is 0 there."""
    model, twist, potential = table_world(2, 3, seed=2)
    potential.log_phi[2:4] = -INF
    log_f = [2 * torch.randn(2**t, generator=generator(t)).double() for t in range(4)]
    log_f[2][1] = -INF
    log_prefix = lambda tokens: log_f[tokens.shape[1]][sequence_numbers(tokens, 2)]  # noqa: E731
    return (model, twist, potential), log_prefix


def error(scheme: str = "multinomial", ess_threshold: float = 1.0, *changes) -> float:
    """How far Z-hat and the samples are from unbiased, with the sampler changed or as it is."""
    world, log_prefix = dead_world()
    options = {"module": mutant(tsmc.sampler, *changes), "log_prefix": log_prefix}
    try:
        return worlds.bias(*world, 2, scheme, ess_threshold, **options)
    except InputError:  # log Z-hat is NaN or infinite
        return INF


@pytest.mark.parametrize("ess_threshold", [1.0, ADAPTIVE, 0.0])
def test_unbiased_with_dead_beginnings(ess_threshold):
    for scheme in ("multinomial", "systematic"):
        assert error(scheme, ess_threshold) < 1e-12


MUTANTS = {
    "f leaves no trace in the weights": ("log_w = log_w + log_f", "pass"),
    "f is not divided out": ("log_w.view_as(log_p) - log_f", "log_w.view_as(log_p)"),
    "f = 0 is divided out": ("log_f = log_f.masked_fill(log_f == -torch.inf, 0.0)", "pass"),
    "f stays behind when particles move": ("log_f = log_f[run, ancestors]", "pass"),
    "f counts at T too": ("log_prefix is not None and not is_last", "log_prefix is not None"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name):
    assert max(error("multinomial", rule, MUTANTS[name]) for rule in (1.0, ADAPTIVE)) > 1e-3


def test_many_runs_use_the_prefix_part_of_sigma():
    (model, twist, potential), log_prefix = dead_world()
    sigma, rule = Sigma(model, potential, log_prefix), {"ess_threshold": 0.5}
    drawn = draw_population(Streams(), "x", None, sigma, twist, 5, 20, ess_threshold=0.0)
    given = (model, twist, potential, 5, Streams().stream("x", None, 0), 20)
    assert torch.equal(drawn.log_z, tsmc.sampler.tsmc(*given, **rule, log_prefix=log_prefix).log_z)


@pytest.mark.parametrize("spec", ["without:dog", "without~2:dog"])
def test_f_is_never_below_phi_of_a_continuation(spec):
    (factor,) = make_factors([spec], 1.0, None)
    pieces = [" dog", "gy", ".", '"', " a b"]
    texts = ["".join(text) for text in itertools.product(pieces, repeat=4)]
    phi = dict(zip(texts, factor.log_phi(texts), strict=True))
    for begun in {"".join(some) for t in (1, 2, 3) for some in itertools.product(pieces, repeat=t)}:
        (log_f,) = factor.log_prefix([begun])
        assert log_f >= max(value for text, value in phi.items() if text.startswith(begun)), begun


def letters(rows):
    return ["".join("abcdefg"[token] for token in row) for row in rows]


def test_products_add_their_prefix_parts():
    none, length = lambda texts: [0.0], lambda texts: [-float(len(text)) for text in texts]
    factors = [Factor(none, log_prefix=length), Factor(none), Factor(none, log_prefix=length)]
    log_prefix = TextPotential(factors, letters, PROMPT).log_prefix
    assert log_prefix(torch.tensor([[2, 3], [2, 3]])).tolist() == [-8.0] * 2
    assert TextPotential([Factor(none)], letters, PROMPT).log_prefix is None


ZERO = "[0.0] * len(texts)"
WRONG = {  # log f, log phi: the fault
    ("[0.0 if len(t) > 3 else -math.inf for t in texts]", ZERO): "is -inf; let it be a number",
    ("[-float(len(texts))] * len(texts)", ZERO): "in a batch, -1 alone; it must",
    ("[math.nan] * len(texts)", ZERO): "log phi is nan for 'bc",
    (ZERO, "[-float(len(texts))] * len(texts)"): "in a batch, -1 alone; it must",
}


@pytest.mark.parametrize(("log_f", "log_phi"), WRONG)
def test_what_is_no_function_of_the_text_is_one_line(tmp_path, log_f, log_phi):
    path = tmp_path / "my.py"
    parts = f"def g(texts): return {log_f}\ndef f(texts): return {log_phi}\nf.prefix = g\n"
    path.write_text(f"import math\n{parts}")
    potential = TextPotential(make_factors([f"{path}:f"], 1.0, None), letters, PROMPT)
    with pytest.raises(InputError) as caught:
        check_potential(tiny_conditional(1), potential, generator(0))
    assert f"--potential {path}:f" in str(caught.value)
    assert WRONG[log_f, log_phi] in str(caught.value)
