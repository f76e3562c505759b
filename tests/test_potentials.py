"""Potentials: the ready ones, products, a user's file and what can be wrong with it, whole runs."""

import contextlib
import math
import re
from types import SimpleNamespace

import pytest
import torch

from eval.run.evaluate import check_base_rate
from eval.run.options import POCKET, RunConfig
from eval.scorers import toxicity
from eval.scorers.potentials import make_factors
from tinystories.errors import InputError
from twist.factors import power
from twist.potential import Factor, TextPotential

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
        ("keyword:a.b (c)?", " axb c", -INF),
        ("keyword~0.5:cat", " dog", -0.5),
        ("regex:^ (big|red) cat~5:", " red cat~5: x", 0.0),
        ("regex~2:a:b~c", " a:b", -2.0),
        ("first-sentence~2:4", " little girl named Amy. Amy liked", 0.0),
        ("first-sentence~2:1", ' girl who said, "Hello!" Then', -6.0),
        ("first-sentence:5", " boy who didn't stop!", -INF),
        ("first-sentence~2:4", " little girl named", -8.0),
    ],
)
def test_what_the_option_means(scorer, spec, text, log_phi):
    """--beta does not apply; a first sentence that does not end has no words."""
    (factor,) = make_factors([spec], 10.0, scorer)
    assert list(factor.log_phi([text])) == [log_phi] and factor.reads == "continuations"


def test_a_product_adds_what_its_factors_read():
    asked = {}

    def factor(reads, scale):
        def log_phi(batch):
            asked[reads] = batch if isinstance(batch, list) else batch.tolist()
            return torch.arange(len(batch)) * scale

        return Factor(log_phi, reads)

    factors = [factor("texts", -1.0), factor("continuations", -10.0), factor("tokens", -100.0)]
    log_phi = TextPotential(factors, letters, PROMPT)
    assert log_phi(torch.tensor([[3, 4], [5, 6], [3, 4]])).tolist() == [0.0, -111.0, -200.0]
    assert asked["texts"] == ["b c d e", "b c f g"]
    assert asked["continuations"] == [" d e", " f g"], "without the prompt, equal texts once"
    assert asked["tokens"] == [[3, 4], [5, 6], [3, 4]]


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


REFUSED = "toxic keyword keyword: :cat Keyword:cat keyword~:cat keyword~0:cat keyword~nan:cat"
REFUSED += f" first-sentence:0 first-sentence:many first-sentence:{10**400} regex:( x.py:f"


@pytest.mark.parametrize("spec", REFUSED.split())
def test_what_is_not_understood_is_one_line(scorer, spec):
    with pytest.raises(InputError, match=rf"^--potential {re.escape(spec)}[: ].*; .+$"):
        make_factors([spec], 1.0, scorer)


MODES = "torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)"


@pytest.mark.parametrize(
    ("reads", "body", "log_phi"),
    [
        ("texts", "return [-2.0 * len(text) for text in texts]", [-14.0, -14.0]),
        ("texts", "return [-1e8 - 0.25 for text in texts]", [-1e8 - 0.25] * 2),
        ("texts", "print(1); return [float('-inf')] * len(texts)", [-INF, -INF]),
        ("texts", "texts.pop(); return [-1.0, -1.0]", [-1.0, -1.0]),
        ("continuations", "return [float(len(text)) for text in continuations]", [4.0, 4.0]),
        ("tokens", "return -3.0 * tokens.zero_()[:, 0] - 2", [-2.0, -2.0]),
        ("texts", f"{MODES}; return torch.zeros(len(texts))", [0.0, 0.0]),
    ],
)
def test_a_function_of_the_users_own(tmp_path, scorer, capsys, reads, body, log_phi):
    """It may return what it likes, works on a copy, and --beta does not apply to it."""
    path = tmp_path / "my.py"
    path.write_text(f"import torch\ndef f({reads}): {body}\nf.reads = {reads!r}\n")
    factors = make_factors([f"{path}:f"], 10.0, scorer)
    tokens = torch.tensor([[3, 4], [5, 6]])
    value = TextPotential(factors, letters, PROMPT)(tokens)
    assert value.tolist() == log_phi and value.dtype == torch.float64 and not value.requires_grad
    assert tokens.tolist() == [[3, 4], [5, 6]]
    assert capsys.readouterr().out == "", "standard output is for results"
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("def f(texts): return [float('nan')]", "nan for 'b c d e'"),
        ("def f(texts): return [[0.0]]", "shape [1, 1] for 1 texts"),
        ("def f(texts):\n    raise ValueError('one\\ntwo')", "line 2: ValueError: one)"),
        ("def f(texts): return ['a' in texts[0] or -5.0, -5.0]", "shape [2]"),
        ("def f(texts): return ['b' in texts[0] or -5.0]", "true or false"),
        ("import torch\ndef f(texts): return torch.tensor([1j])", "log phi is complex"),
        ("def f(texts): pass", "cannot be read as numbers"),
        ("x = = 1", "SyntaxError"),
        ("f = 3", "f must be a function"),
        ("class C:\n  reads = property(lambda self: 1 / 0)\nf = C()", "ZeroDivisionError"),
        ("import asyncio\ndef f(texts): raise asyncio.CancelledError", "CancelledError"),
        ("class E(Exception):\n  def __str__(self): 1 / 0\ndef f(texts): raise E", "line 3: "),
        ("def f(texts): pass\nf.reads = 'words'", "`reads` one of texts, continuations, tokens"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_one_line(tmp_path, scorer, content, part):
    (tmp_path / "my.py").write_text(content)
    spec = f"{tmp_path / 'my.py'}:f"
    with pytest.raises(InputError) as caught:
        factors = make_factors([spec], 1.0, scorer)
        TextPotential(factors, letters, PROMPT)(torch.tensor([[3, 4]]))
    message = str(caught.value)
    assert message.startswith(f"--potential {spec} failed (") and part in message
    assert message.isprintable() and message.endswith("N numbers below infinity")


@pytest.mark.parametrize("learner", ["pooled", "published"])
def test_a_rare_constraint_names_the_remedy_at_once(learner):
    """Of its first batch ten should have phi > 0; the published learner refuses less than 0.5."""
    said, batch = [], {"pooled": "pool_first_draws", "published": "ctl_batch_size"}[learner]
    config, run = RunConfig(learner=learner, **{batch: 500}), SimpleNamespace(say=said.append)
    for alive in (0, 1, 39, 40, 2000):
        log_phi = torch.full((2000,), -INF)
        log_phi[:alive] = 0
        is_refused = learner == "published" and alive < 2
        refusal = pytest.raises(InputError, match="add --learner pooled, soften the potential")
        with refusal if is_refused else contextlib.nullcontext():
            check_base_rate(run, config, log_phi)
    assert ["soften the potential (~" in line for line in said] == [True, True, True, False]
    assert "40 of 2000" in said[3]
