"""Potentials and prefix parts: ready ones, products, one's own, what can be wrong with them."""

import itertools
import math
import re

import pytest
import torch
from worlds import END, generator, letters, tiny_conditional

from eval.config import POCKET
from eval.scorers import toxicity
from eval.scorers.potentials import make_factors
from tinystories.errors import InputError
from twist.factors import keyword, without
from twist.potential import Factor, TextPotential, check_potential

INF = math.inf
PROMPT = torch.tensor([1, 2])


@pytest.fixture(scope="module")
def scorer() -> toxicity.ToxicityScorer:
    return toxicity.ToxicityScorer(*toxicity.load(POCKET / "toxicity"))


@pytest.mark.parametrize(
    ("spec", "text", "log_phi"),
    [
        ("keyword:dragon", " red Dragon-fly.", 0.0),
        ("keyword:dragon", " dragons snapdragon", -INF),
        ("keyword~0.5:cat", " dog", -0.5),
        ("keyword:a.b", " axb", -INF),
        ("regex~2:a:b~c", " a:b", -2.0),
        ("without:dog", " a Dog", -INF),
        ("without~2:dog", " dogs", 0.0),
    ],
)
def test_what_the_option_means(scorer, spec, text, log_phi):
    """--beta does not apply."""
    (factor,) = make_factors([spec], 10.0, scorer)
    assert list(factor.log_phi([text])) == [log_phi] and factor.reads == "continuations"


def test_the_classifier_in_both_directions_and_beta_which_applies_to_it_alone(scorer):
    texts = ["Once upon a time, there was a " + rest for rest in ("fat ugly pig.", "kind girl.")]
    factors = make_factors(["toxicity", "nontoxicity"], 10.0, scorer)
    toxic, safe = (factor.log_phi(texts) for factor in factors)
    assert torch.equal(toxic, 10.0 * scorer(texts).double())
    assert toxic[0] > toxic[1] and safe[0] < safe[1]
    at_zero = make_factors(["toxicity", "keyword:cat"], 0.0, scorer)
    assert [list(factor.log_phi([" dog"])) for factor in at_zero] == [[0.0], [-INF]]


def test_hints_are_those_of_the_factors():
    def log_phi(texts):
        return [0.0 if "submarine" in text else -INF for text in texts]

    log_phi.hints = ["submarine", "boat"]
    factors = [keyword("red cat"), without("dog"), log_phi]
    assert TextPotential(factors, letters, PROMPT).hints == []
    hints = TextPotential(factors, letters, PROMPT, encode=lambda text: list(map(ord, text))).hints
    words = [["".join(map(chr, hint)) for hint in own] for own in hints]
    assert words == [[" red cat"], [" submarine", " boat"]]


REFUSED = "toxic keyword keyword: keyword~:cat keyword~0:cat regex:( x.py:f withoutt:dog"


@pytest.mark.parametrize("spec", REFUSED.split())
def test_what_is_not_understood_is_one_line(scorer, spec):
    known = "without:WORD or FILE.py:NAME" if spec != "x.py:f" else "No such file"
    with pytest.raises(InputError, match=rf"^--potential {re.escape(spec)}.*: .*{known}"):
        make_factors([spec], 1.0, scorer)


@pytest.mark.parametrize(
    ("reads", "body", "log_phi"),
    [
        ("texts", "return [-1e8 - 0.25 * len(text) for text in texts]", [-1e8 - 1.0] * 2),
        ("texts", "print(1); return [float('-inf')] * len(texts)", [-INF, -INF]),
        ("continuations", "return [float(len(text)) for text in continuations]", [2.0, 2.0]),
        ("texts", "return torch.zeros(len(texts), requires_grad=True)", [0.0, 0.0]),
    ],
)
def test_a_function_of_the_users_own(tmp_path, scorer, capsys, reads, body, log_phi):
    """It may return numbers in any form, and --beta does not apply to it."""
    path = tmp_path / "my.py"
    path.write_text(f"import torch\ndef f({reads}): {body}\nf.reads = {reads!r}\n")
    factors = make_factors([f"{path}:f"], 10.0, scorer)
    value = TextPotential(factors, letters, PROMPT)(torch.tensor([[3, 4], [5, 6]]))
    assert value.tolist() == log_phi and value.dtype == torch.float64 and not value.requires_grad
    assert capsys.readouterr().out == "", "standard output is for results"
    with pytest.raises(InputError, match=r"give FILE\.py:NAME; it defines f"):
        make_factors([str(path)], 10.0, scorer)


def complaint(factor) -> str:
    """What is said of a function of texts, or of FILE.py:NAME, where something is wrong with it."""
    try:
        factors = make_factors([factor], 1.0, None) if isinstance(factor, str) else [factor]
        potential = TextPotential(factors, letters, PROMPT)
        check_potential(tiny_conditional(1), potential, generator(0))
    except InputError as error:
        return str(error)
    return ""


PREFIX = "def f(texts): return [0.0] * len(texts)\nf.prefix = lambda texts: [{}] * len(texts)"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("def f(texts): return [float('nan')] * len(texts)", "nan for 'bc"),
        ("def f(texts): return [[0.0]]", "shape [1, 1] for 8 texts"),
        ("def f(texts): return [True]", "true or false; return 0 for true and -inf for false"),
        ("def f(texts):\n    raise ValueError('one\\ntwo')", "line 2: ValueError: one)"),
        ("def f(texts): pass\nf.hints = 'cat'", "the hints are 'cat'; give a list"),
        ("def f(texts): pass", "cannot be read as numbers"),
        ("x = = 1", "SyntaxError"),
        ("f = 3", "NAME must be a function"),
        ("def f(texts): pass\nf.reads = 'words'", "give one of texts, continuations"),
        (PREFIX.format("float('-inf')"), "is -inf; let it be a number"),
        (PREFIX.format("-float(len(texts))"), "in a batch, -1 alone; it must"),
        (PREFIX.format("float('nan')"), "log phi is nan for 'bc"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_one_line(tmp_path, content, part):
    """With the function or with its prefix part."""
    path = tmp_path / "my.py"
    path.write_text(content)
    message = complaint(f"{path}:f")
    assert message.startswith(f"--potential {path}:f") and part in message
    assert message.isprintable() and ";" in message


def sums(texts: list[str]) -> torch.Tensor:
    """Numbers of texts, from -32 to -8."""
    return -torch.tensor([float(sum(map(ord, text[2:])) - 380) for text in texts]).double()


def test_what_depends_on_the_other_texts_is_refused_and_half_precision_is_not():
    assert "alone; it must depend on" in complaint(lambda texts: sums(texts).log_softmax(0))
    assert "alone; it must depend on" in complaint(lambda texts: sums(texts) - len(texts) ** 2)
    dead = lambda texts: [-INF if "a" in text[2:] else 0.0 for text in texts]  # noqa: E731
    assert complaint(sums) == complaint(dead) == ""

    def rounded(texts):
        """As rounding to bfloat16 in a network, whose products depend on the batch."""
        error = torch.randn(len(texts), generator=generator(len(texts))).clamp(-1, 1)
        return sums(texts) * (1 + 0.02 * error)

    assert complaint(rounded) == ""


@pytest.mark.parametrize("spec", ["without:dog", "without~2:dog"])
def test_f_is_never_below_phi_of_a_continuation(spec):
    (factor,) = make_factors([spec], 1.0, None)
    pieces = [" dog", "gy", ".", '"', " a b"]
    texts = ["".join(text) for text in itertools.product(pieces, repeat=4)]
    phi = dict(zip(texts, factor.log_phi(texts), strict=True))
    for begun in {"".join(some) for t in (1, 2, 3) for some in itertools.product(pieces, repeat=t)}:
        (log_f,) = factor.log_prefix([begun])
        assert log_f >= max(value for text, value in phi.items() if text.startswith(begun)), begun


def test_products_add_their_prefix_parts():
    none, length = lambda texts: [0.0], lambda texts: [-float(len(text)) for text in texts]
    factors = [Factor(none, log_prefix=length), Factor(none), Factor(none, log_prefix=length)]
    log_prefix = TextPotential(factors, letters, PROMPT).log_prefix
    assert log_prefix(torch.tensor([[2, 3], [2, 3]])).tolist() == [-8.0] * 2
    assert TextPotential([Factor(none)], letters, PROMPT).log_prefix is None


def test_the_potential_reads_whole_characters_before_the_end():
    words = ["Once", "<end>", " a", " b\ufffd"]
    decode = lambda rows: ["".join(words[t] for t in row) for row in rows]  # noqa: E731
    phi = TextPotential([], decode, torch.tensor([0]), END)
    found = phi.texts(torch.tensor([[2, 1, 1], [1, 1, 1], [2, 3, 2], [2, 2, 3]]))
    assert found == ["Once a", "Once", "Once a b\ufffd a", "Once a a b"]
