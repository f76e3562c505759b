"""Potentials: the ready ones, products, a user's file and what can be wrong with it, whole runs."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies

from eval.run.options import POCKET, RunConfig
from eval.run.setup import LastCall, identity, load_setup, sigma_key
from eval.run.target import TargetKey, load_target, save_target
from eval.scorers.potentials import fingerprints, make_factors
from eval.scorers.toxicity import ToxicityScorer, load
from main import main
from tinystories.errors import InputError
from tsmc.rejection import ExactSamples
from twist.potential import Factor, TextPotential, first_sentence, keyword, power, regex

INF = math.inf
SMALL = "--generations 1 --ctl-updates 3 --ctl-batch-size 20 --particles 10 --distill-runs 6"
SMALL += " --distill-updates 2 --distill-batch-size 8 --eval-runs 4 --eval-particles 10"
SMALL += " --eval-base-samples 40 --length 10"


def letters(rows: list[list[int]]) -> list[str]:
    """Texts of rows of tokens: token i is the i-th letter."""
    return [" ".join("abcdefg"[token] for token in row) for row in rows]


@pytest.fixture(scope="module")
def scorer() -> ToxicityScorer:
    return ToxicityScorer(*load(POCKET / "toxicity"))


@pytest.mark.parametrize(
    ("factor", "text", "is_hit"),
    [
        *[(keyword, text, True) for text in (" red dragon.", " Dragon", "dragon-fly")],
        *[(keyword, text, False) for text in (" dragons", " snapdragon", "")],
        (lambda _, *c: keyword("a.b (c)?", *c), " a.b (c)?", True),
        (lambda _, *c: keyword("a.b (c)?", *c), " axb c", False),
        (lambda _, *c: regex("^ (big|red) cat~5:", *c), " red cat~5: x", True),
        (lambda _, *c: regex("^ (big|red) cat~5:", *c), " Red cat~5:", False),
        (lambda _, *c: regex("^ (big|red) cat~5:", *c), " a red cat~5:", False),
    ],
)
def test_words_and_patterns(factor, text, is_hit):
    assert factor("dragon").log_phi([text]).tolist() == [0.0 if is_hit else -INF]
    assert factor("dragon", 5.0).log_phi([text]).tolist() == [0.0 if is_hit else -5.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" little girl named Amy. Amy liked", 4),
        (' girl who said, "Hello!" Then', 4),
        (" tree that was 3.5 m high... Then", 6),
        (" boy who didn't stop!", 4),
        (" little girl named", 0),
        (".", 0),
    ],
)
def test_the_first_sentence_ends_with_a_full_stop_or_has_no_length(text, words):
    for wanted in (1, 4, 6):
        distance = abs(wanted - words)
        assert first_sentence(wanted, 2.0).log_phi([text]).item() == -2.0 * distance
        assert first_sentence(wanted).log_phi([text]).item() == (-INF if distance else 0.0)


def test_a_product_adds_what_its_factors_read():
    asked = {}

    def of_texts(texts):
        asked["texts"] = list(texts)
        return torch.full((len(texts),), -1.0)

    def of_continuations(continuations):
        asked["continuations"] = list(continuations)
        return torch.arange(len(continuations)) * -10.0

    def of_tokens(tokens):
        asked["tokens"] = tokens.tolist()
        return -100.0 * tokens[:, 0]

    factors = [Factor(of_texts), Factor(of_continuations, "continuations")]
    factors.append(Factor(of_tokens, "tokens"))
    log_phi = TextPotential(factors, letters, torch.tensor([1, 2]))
    assert log_phi(torch.tensor([[3, 4], [5, 6], [3, 4]])).tolist() == [-301.0, -511.0, -301.0]
    assert asked["texts"] == ["b c d e", "b c f g"]
    assert asked["tokens"] == [[3, 4], [5, 6], [3, 4]]
    assert asked["continuations"] == [" d e", " f g"], "without the prompt, equal texts once"


def test_one_pass_of_the_classifier_serves_both_directions(scorer, monkeypatch):
    start = "Once upon a time, there was a "
    texts = [start + "fat ugly pig.", start + "kind girl."]
    calls, run, wanted = [], scorer.run, 10.0 * scorer(texts)
    monkeypatch.setattr(scorer, "run", lambda texts: calls.append(texts) or run(texts))
    monkeypatch.setattr(scorer, "logits", LastCall(scorer.logits), raising=False)
    factors = make_factors(["toxicity", "nontoxicity"], 10.0, scorer)
    toxic, safe = (factor.log_phi(texts) for factor in factors)
    assert torch.equal(toxic, wanted) and torch.equal(10.0 * scorer(texts), wanted)
    torch.testing.assert_close(toxic.div(10).exp() + safe.div(10).exp(), torch.ones(2))
    assert toxic[0] > toxic[1] and safe[0] < safe[1]
    assert len(calls) == 1, "the logits of the last texts are kept"
    scorer(texts[:1])
    assert len(calls) == 2


def test_beta_applies_to_the_classifier_alone(scorer):
    at_zero = make_factors(["toxicity", "keyword:cat"], 0.0, scorer)
    assert [factor.log_phi([" dog"]).item() for factor in at_zero] == [0.0, -INF]
    assert power(lambda texts: torch.tensor([-INF]), 0.0).log_phi(["x"]).item() == 0.0


@pytest.mark.parametrize(
    ("spec", "text", "log_phi"),
    [
        ("keyword~5:red cat", " the red cat", 0.0),
        ("keyword~0.5:cat", " dog", -0.5),
        ("regex~2:a:b~c", " a:b~c", 0.0),
        ("regex:x.py:y", " x.py:y", 0.0),
        ("first-sentence~3:2", " a b c d.", -6.0),
        ("first-sentence:2", " a b.", 0.0),
    ],
)
def test_what_the_option_means(scorer, spec, text, log_phi):
    (factor,) = make_factors([spec], 10.0, scorer)
    assert factor.log_phi([text]).tolist() == [log_phi] and factor.reads == "continuations"


REFUSED = "toxic keyword keyword: :cat Keyword:cat keyword~:cat keyword~0:cat keyword~inf:cat"
REFUSED += " keyword~nan:cat keyword~x:cat first-sentence:0 first-sentence:many regex:( x.py:f"
REFUSED += f" first-sentence:{10**400}"


@pytest.mark.parametrize("spec", REFUSED.split())
def test_what_is_not_understood_is_one_line(scorer, spec):
    with pytest.raises(InputError, match=rf"^--potential {re.escape(spec)}[: ].*\(|; ") as caught:
        make_factors([spec], 1.0, scorer)
    assert "\n" not in str(caught.value)


@given(spec=strategies.text(strategies.characters(codec="utf-8", exclude_categories=["Cs"])))
@settings(max_examples=50, deadline=None)
def test_any_option_is_understood_or_refused_in_one_line(scorer, spec):
    for text in (spec, f"regex:{spec}", f"keyword~{spec}", f"first-sentence:{spec}"):
        try:
            make_factors([text], 1.0, scorer)
        except InputError as error:
            assert "\n" not in str(error) and "--potential" in str(error)


OWN = """
import asyncio, sys
import numpy, torch

def doubled(texts): return [-2.0 * len(text) for text in texts]
def array(texts): return numpy.array([-len(text) for text in texts])
def tensor(texts): return torch.tensor([-1.0 * len(text) for text in texts], requires_grad=True)
def scalars(texts): return [torch.tensor(-1.0) for _ in texts]
def of_continuations(continuations): return [float(len(text)) for text in continuations]
of_continuations.reads = "continuations"
def of_tokens(tokens): return -tokens.sum(-1)
of_tokens.reads = "tokens"
def ruled_out(texts): return [float("-inf")] * len(texts)
class Counted:
    reads = "tokens"
    def __call__(self, tokens): return 0 * tokens[:, 0]
counted = Counted()
def zeroing(tokens): return -3.0 * tokens.zero_()[:, 0] - 2
zeroing.reads = "tokens"
def clearing(texts): return [-5.0 for _ in range(len(texts)) if texts.pop()]
def backwards(texts): return numpy.array([-1.0, -2.0])[::-1]
def setting(texts):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    print("said")
    return [-1.0] * len(texts)

def nan(texts): return [float("nan")] * len(texts)
def infinite(texts): return [float("inf")] * len(texts)
def column(texts): return torch.zeros(len(texts), 1)
def one(texts): return 0.0
def strings(texts): return list(texts)
def nothing(texts): pass
def without(): return 0
def raising(texts):
    raise ValueError("first line\\nsecond line")
def leaving(texts): sys.exit(0)
def cancelled(texts): raise asyncio.CancelledError
def closed(texts): raise GeneratorExit
def stopped(texts): raise StopIteration
class Mute(BaseException):
    def __str__(self): raise Mute
def mute(texts): raise Mute
class Touchy:
    def __len__(self): raise Mute
    def __array__(self, *arguments): raise Mute
def touchy(texts): return Touchy()
def complex(texts): return torch.ones(len(texts), dtype=torch.complex64)
def meta(texts): return torch.empty(len(texts), device="meta")
def sparse(texts): return torch.full((len(texts),), float("nan")).to_sparse()
def nested(texts): return torch.nested.nested_tensor([torch.zeros(2) for _ in texts])
def misread(texts): return torch.zeros(len(texts))
misread.reads = "words"
number = 3
"""


@pytest.fixture
def own(tmp_path) -> Path:
    """A file of the user's own."""
    (tmp_path / "my.py").write_text(OWN)
    return tmp_path / "my.py"


@pytest.mark.parametrize(
    ("name", "log_phi"),
    [
        ("doubled", [-14.0, -14.0]),
        ("array", [-7.0, -7.0]),
        ("tensor", [-7.0, -7.0]),
        ("scalars", [-1.0, -1.0]),
        ("of_continuations", [4.0, 4.0]),
        ("of_tokens", [-7.0, -11.0]),
        ("ruled_out", [-INF, -INF]),
        ("counted", [0.0, 0.0]),
        ("zeroing", [-2.0, -2.0]),
        ("clearing", [-5.0, -5.0]),
        ("backwards", [-2.0, -1.0]),
        ("setting", [-1.0, -1.0]),
    ],
)
def test_a_function_of_the_users_own(own, scorer, capsys, name, log_phi):
    """It may return what it likes, works on a copy, and --beta does not apply to it."""
    factors = make_factors([f"{own}:{name}"], 10.0, scorer)
    potential = TextPotential(factors, letters, torch.tensor([1, 2]))
    value = potential(tokens := torch.tensor([[3, 4], [5, 6]]))
    assert value.tolist() == log_phi and value.dtype == torch.float32 and not value.requires_grad
    assert tokens.tolist() == [[3, 4], [5, 6]]
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert capsys.readouterr().out == "", "standard output is for results"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nan", "nan for 'b c d e'"),
        ("infinite", "inf for 'b c d e'"),
        ("column", "shape [1, 1] for 1 texts"),
        ("one", "shape [] for 1 texts"),
        ("strings", "TypeError"),
        ("nothing", "TypeError"),
        ("without", "TypeError"),
        ("raising", "ValueError: first line)"),
        ("leaving", "SystemExit: 0"),
        ("cancelled", "CancelledError: no message"),
        ("closed", "GeneratorExit: no message"),
        ("stopped", "StopIteration: no message"),
        ("mute", "Mute: no message"),
        ("touchy", "Mute: no message"),
        ("complex", "complex64"),
        ("meta", "Error: "),
        ("sparse", "Error: "),
        ("nested", "Error: "),
        ("misread", "its `reads` one of texts, continuations, tokens"),
        ("number", "number must be a function"),
        ("absent", "has no attribute 'absent'"),
        ("", "has no attribute ''"),
    ],
)
def test_what_is_wrong_with_a_users_function_is_one_line(own, scorer, name, part):
    with pytest.raises(InputError) as caught:
        factors = make_factors([f"{own}:{name}"], 1.0, scorer)
        TextPotential(factors, letters, torch.tensor([1, 2]))(torch.tensor([[3, 4]]))
    message = str(caught.value)
    assert message.startswith(f"--potential {own}:{name}") and part in message
    assert "\n" not in message and message.endswith("N numbers below infinity")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("x = = 1", "SyntaxError"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
        ("1 / 0", "line 1: ZeroDivisionError"),
    ],
)
def test_a_users_file_that_cannot_be_run_is_one_line(tmp_path, scorer, content, part):
    (tmp_path / "broken.py").write_text(content)
    for _ in range(2):
        with pytest.raises(InputError, match=r"broken\.py:f failed") as caught:
            make_factors([f"{tmp_path / 'broken.py'}:f"], 1.0, scorer)
        assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_users_file_is_run_once_and_again_when_it_has_changed(tmp_path, scorer):
    path = tmp_path / "counts.py"
    body = "open(__file__ + '.log', 'a').write('x')\n"
    path.write_text(body + "def f(texts): return [-1.0] * len(texts)\ng = f\n")
    make_factors([f"{path}:f", f"{path}:g"], 1.0, scorer)
    assert Path(f"{path}.log").read_text() == "x"
    path.write_text(body + "def f(texts): return [-2.0] * len(texts)\n")
    assert make_factors([f"{path}:f"], 1.0, scorer)[0].log_phi(["a"]).tolist() == [-2.0]


def test_sigma_and_the_identity_of_a_run_follow_the_users_file(own, tmp_path):
    config = RunConfig(potential=("toxicity", f"{own}:array"))
    key, names = sigma_key(config), identity(config)
    assert key.potential[0] == "toxicity" and str(own) in names
    own.write_text(OWN + "#")
    assert sigma_key(config) != key and identity(config)[str(own)] != names[str(own)]
    own.write_text(OWN)
    own.rename(tmp_path / "moved.py")
    moved = f"{tmp_path / 'moved.py'}:array"
    assert fingerprints(["toxicity", moved]) == key.potential, "where the file is does not matter"


def test_samples_of_another_potential_are_passed_over_and_old_files_mean_toxicity(tmp_path):
    tokens, log_phi = torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([-0.5, -0.25])
    names = ("a" * 64, "b" * 64, "Once", 3, 10.0)
    save_target(tmp_path, ExactSamples(tokens, log_phi, 900, -7.5, 0.04), TargetKey(*names))
    raw = json.loads((tmp_path / "target.json").read_text())
    assert raw["key"].pop("potential") == ["toxicity"]
    (tmp_path / "target.json").write_text(json.dumps(raw))
    assert load_target(tmp_path, TargetKey(*names), 4) is not None
    assert load_target(tmp_path, TargetKey(*names, ["keyword:cat"]), 4) is None
    assert load_setup(RunConfig()).exact is not None, "the shipped samples serve the default"


def run_main(out: Path, *arguments: object) -> dict:
    """results.json of a small run."""
    main([*SMALL.split(), "--out", str(out), *map(str, arguments)])
    return json.loads((out / "results.json").read_text())


def test_a_hard_keyword_with_a_soft_one(tmp_path, capsys):
    """phi is zero for many base samples, and -inf is null in every file."""
    potential = ["regex: (big|little|small)", "keyword~1:girl", "nontoxicity"]
    options = [part for spec in potential for part in ("--potential", spec)]
    result = run_main(tmp_path / "run", *options, "--beta", 1, "--eval-target-proposals", 300)
    assert result["potential"] == potential
    base, target, *rows = result["base"], result["target"], *result["generations"]
    assert base["log_phi"] is None and 0 < base["phi_positive"] < 1 and 0 <= base["toxicity"] <= 1
    for row in (target, *rows):
        assert row["phi_positive"] == 1 and -3 < row["log_phi"] <= 0
    assert all("kl_target_proposal" in row and "model_log_phi" in row for row in rows)
    table = capsys.readouterr().out
    assert "log phi" in table and "phi > 0" in table and "-inf" in table
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    is_null = {row["log_phi"] is None for row in samples if row["source"] == "base"}
    assert is_null == {True, False}
    assert all(row["log_phi"] is not None for row in samples if row["source"] != "base")


def test_a_potential_above_one_works_without_exact_samples_only(tmp_path, own, capsys):
    potential = ("--potential", f"{own}:of_continuations", "--potential", "keyword~2:girl")
    results = run_main(tmp_path / "run", *potential, "--eval-target-proposals", 0)
    assert not results.get("target") and results["base"]["log_phi"] > 0
    assert all("kl_target_proposal" not in row for row in results["generations"])
    assert "KL" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*SMALL.split(), "--out", str(tmp_path / "other"), *potential])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and "subtract an upper bound" in line


@pytest.mark.parametrize("spec", ["my.py:nan", "my.py:absent", "none.py:f", "keyword", "regex:("])
def test_a_wrong_potential_stops_a_run_before_anything_is_written(
    tmp_path, own, capsys, monkeypatch, spec
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*SMALL.split(), "--out", "run", "--potential", spec])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and f"--potential {spec}" in line and not Path("run").exists()


LEARNED = "--method pooled --generations 0 --pool-base-draws 2000 --pool-rounds 1 --pool-draws 500"
LEARNED += " --pool-updates 40 --pool-batch-size 64 --pool-learning-rate 3e-4 --eval-runs 6"
LEARNED += " --eval-particles 30 --eval-base-samples 300 --eval-target-proposals 0 --seed 5"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("potential", "satisfied"),
    [
        ("nontoxicity", None),
        ("keyword:dragon", r"(?i)\bdragon\b"),
        ("regex: (red|blue) ", " (red|blue) "),
        ("first-sentence:8", None),
        ("keyword~5:dragon", None),
        ("first-sentence~0.5:8", None),
        ("my.py:log_phi", None),
    ],
)
def test_every_kind_of_potential_is_learned(tmp_path, monkeypatch, potential, satisfied):
    """Hard potentials hold for every sample, soft ones much better than for the base model."""
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("def log_phi(texts): return [-0.5 * t.count('e') for t in texts]\n")
    main([*LEARNED.split(), "--out", "run", "--potential", potential])
    results = json.loads(Path("run/results.json").read_text())
    (row,) = results["generations"]
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    texts = [sample["text"] for sample in samples if sample["source"] != "base"]
    assert row["phi_positive"] == 1 and texts
    if satisfied:
        continuations = [text.removeprefix(results["prompt"]) for text in texts]
        assert all(re.search(satisfied, text) for text in continuations)
    if results["base"]["log_phi"] is not None:
        gain = 0.01 if potential == "nontoxicity" else 0.1
        assert row["log_phi"] > results["base"]["log_phi"] + gain
