"""Potentials: the ready ones, products, functions of one's own and what can be wrong with them."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from worlds import generator, tiny_conditional

from eval.config import POCKET
from eval.evaluate import say_rate
from eval.scorers import toxicity
from eval.scorers.potentials import make_factors
from tinystories.errors import InputError
from twist.factors import keyword, power, without
from twist.potential import Factor, TextPotential, check_potential

INF = math.inf
PROMPT = torch.tensor([1, 2])


def letters(rows: list[list[int]]) -> list[str]:
    """Texts of rows of tokens: token i is the i-th letter."""
    return [" ".join("abcdefg"[token] for token in row) for row in rows]


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


def test_a_product_adds_what_its_factors_read():
    asked = {}

    def factor(reads, scale):
        def log_phi(batch):
            asked[reads] = batch
            return torch.arange(len(batch)) * scale

        return Factor(log_phi, reads)

    factors = [factor("texts", -1.0), factor("continuations", -10.0)]
    log_phi = TextPotential(factors, letters, PROMPT)
    assert log_phi(torch.tensor([[3, 4], [5, 6], [3, 4]])).tolist() == [0.0, -11.0, 0.0]
    assert asked["texts"] == ["b c d e", "b c f g"]
    assert asked["continuations"] == [" d e", " f g"], "without the prompt, equal texts once"


def test_the_classifier_in_both_directions_and_beta_which_applies_to_it_alone(scorer):
    texts = ["Once upon a time, there was a " + rest for rest in ("fat ugly pig.", "kind girl.")]
    factors = make_factors(["toxicity", "nontoxicity"], 10.0, scorer)
    toxic, safe = (factor.log_phi(texts) for factor in factors)
    assert torch.equal(toxic, 10.0 * scorer(texts).double())
    total = toxic.div(10).exp() + safe.div(10).exp()
    torch.testing.assert_close(total, torch.ones(2).double(), rtol=0, atol=1e-6)
    assert toxic[0] > toxic[1] and safe[0] < safe[1]
    at_zero = make_factors(["toxicity", "keyword:cat"], 0.0, scorer)
    assert [list(factor.log_phi([" dog"])) for factor in at_zero] == [[0.0], [-INF]]
    assert power(lambda texts: torch.tensor([-INF]), 0.0).log_phi(["x"]).item() == 0.0


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
        ("texts", "return [-1e8 - 0.25 * len(text) for text in texts]", [-1e8 - 1.75] * 2),
        ("texts", "print(1); return [float('-inf')] * len(texts)", [-INF, -INF]),
        ("continuations", "return [float(len(text)) for text in continuations]", [4.0, 4.0]),
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


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("def f(texts): return [float('nan')]", "nan for 'b c d e'"),
        ("def f(texts): return [[0.0]]", "shape [1, 1] for 1 texts"),
        ("def f(texts):\n    raise ValueError('one\\ntwo')", "line 2: ValueError: one)"),
        ("def f(texts): return ['a' in texts[0] or -5.0, -5.0]", "shape [2]"),
        ("def f(texts): pass\nf.hints = 'cat'", "the hints are 'cat'; give a list"),
        ("def f(texts): pass", "cannot be read as numbers"),
        ("x = = 1", "SyntaxError"),
        ("f = 3", "a factor must be a function"),
        ("def f(texts): pass\nf.reads = 'words'", "give one of texts, continuations"),
        ("def g(texts): pass\ndef h(texts): pass", "give FILE.py:NAME; it defines g, h"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_one_line(tmp_path, scorer, content, part):
    (tmp_path / "my.py").write_text(content)
    spec = f"{tmp_path / 'my.py'}:f"
    with pytest.raises(InputError) as caught:
        factors = make_factors([spec], 1.0, scorer)
        TextPotential(factors, letters, PROMPT)(torch.tensor([[3, 4]]))
    message = str(caught.value)
    assert message.startswith(f"--potential {spec}") and part in message
    assert message.isprintable() and ";" in message


def test_a_file_without_a_name_and_the_copy_that_a_run_keeps(tmp_path, scorer, monkeypatch):
    path, folder = tmp_path / "my.py", tmp_path / "run"
    path.write_text("def first(texts): return [-1.0] * len(texts)\ndef second(texts): pass")
    with pytest.raises(InputError, match=r"give FILE.py:NAME; it defines first, second"):
        make_factors([str(path)], 1.0, scorer)
    folder.mkdir()
    path.rename(folder / "my.py")
    monkeypatch.chdir(folder)  # relative names are those of another directory
    (factor,) = make_factors(["there/my.py:first"], 1.0, scorer, folder)
    assert factor.log_phi(["x"]).tolist() == [-1.0]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_truth_values_are_no_logarithms(kind):
    log_phi = TextPotential([lambda texts: kind([True, False])], letters, PROMPT)
    with pytest.raises(InputError, match="true or false; return 0 for true and -inf for false"):
        log_phi(torch.tensor([[3], [4]]))


def test_a_function_is_a_factor_and_other_things_are_one_line():
    function = lambda texts: [-float(len(text)) for text in texts]  # noqa: E731
    for factors in ([function], [Factor(function)]):
        assert TextPotential(factors, letters, PROMPT)(torch.tensor([[3]])).tolist() == [-5.0]
    for wrong in ("dog", ["dog"], [None]):
        with pytest.raises(InputError, match="a factor must be a function"):
            TextPotential(wrong, letters, PROMPT)


def check(log_phi) -> str:
    """What `check_potential` has to say of a function of texts."""
    try:
        potential = TextPotential([log_phi], letters, PROMPT)
        check_potential(tiny_conditional(1), potential, generator(0))
    except InputError as error:
        return str(error)
    return ""


def lengths(texts: list[str]) -> torch.Tensor:
    """Numbers of texts, from -60 to 0 or so."""
    return -torch.tensor([float(sum(map(ord, text[4:])) - 400) for text in texts]).double()


def test_what_depends_on_the_other_texts_is_refused_and_half_precision_is_not():
    assert "alone; it must depend on" in check(lambda texts: lengths(texts).log_softmax(0))
    assert "alone; it must depend on" in check(lambda texts: lengths(texts) - len(texts) ** 2)
    dead = lambda texts: [-INF if "a" in text[4:] else 0.0 for text in texts]  # noqa: E731

    def rounded(texts):
        """As rounding to bfloat16 in a network, whose products depend on the batch."""
        error = torch.randn(len(texts), generator=generator(len(texts))).clamp(-1, 1)
        return lengths(texts) * (1 + 0.02 * error)

    def noisy(texts):
        return lengths(texts) + 0.3 * torch.randn(len(texts))

    assert check(lengths) == check(dead) == ""
    assert "alone; it must depend on" in check(rounded) and "must depend on" in check(noisy)
    rounded.rounding = 0.1
    assert check(rounded) == ""


def test_the_classifier_passes_in_half_precision():
    decode = lambda rows: [f"There was a {text} pig." for text in letters(rows)]  # noqa: E731
    classifier, tokenizer = toxicity.load(POCKET / "toxicity")
    half = toxicity.ToxicityScorer(classifier.bfloat16(), tokenizer)
    potential = TextPotential(make_factors(["toxicity"], 10.0, half), decode, PROMPT)
    check_potential(tiny_conditional(1), potential, generator(0))


def test_a_potential_is_checked_once():
    calls = []
    log_phi = TextPotential([lambda texts: calls.append(1) or lengths(texts)], letters, PROMPT)
    for _ in range(2):
        check_potential(tiny_conditional(1), log_phi, generator(0))
    assert len(calls) == 9  # eight texts together, and one by one


def test_an_unfinished_character_at_the_end_is_left_out():
    decode = lambda rows: [text + "\ufffd" for text in letters(rows)]  # noqa: E731
    potential = TextPotential([lambda texts: [-float(len(text)) for text in texts]], decode, PROMPT)
    assert potential.texts(torch.tensor([[2, 3]])) == ["b c c d"]
    assert potential(torch.tensor([[2, 3]])).tolist() == [-7.0]


def test_a_rare_constraint_names_the_remedy():
    said = []
    for alive in (0, 9, 10, 2000):
        log_phi = torch.full((2000,), -INF)
        log_phi[:alive] = 0
        said.clear()
        say_rate(SimpleNamespace(say=said.append), log_phi)
        assert len(said) == (alive < 10)
        assert not said or re.match(f"{alive} of 2000 .*pooled and hints, or soften", said[0])
