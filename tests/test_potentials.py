"""Potentials: the ready ones, products, a user's file and what can be wrong with it, and whole runs with each kind."""

import json
import math
import re
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies
from worlds import letters

from eval.run.directory import finite_or_null
from eval.run.options import POCKET, RunConfig
from eval.run.setup import LastCall, identity, load_setup, sigma_key
from eval.run.table import columns, table
from eval.run.target import TargetKey, load_target, save_target
from eval.scorers import potentials
from eval.scorers.potentials import fingerprints, make_factors
from eval.scorers.toxicity import ToxicityScorer, load
from eval.summary import summarise
from main import main
from tinystories.errors import InputError
from tsmc import ExactSamples
from twist import Factor, TextPotential, first_sentence, keyword, power, regex

SMALL = [
    *("--method", "distilled", "--generations", "1"),
    *("--ctl-updates", "3", "--ctl-batch-size", "20", "--particles", "10", "--distill-runs", "6"),
    *("--distill-updates", "2", "--distill-batch-size", "8", "--eval-runs", "4", "--eval-particles", "10"),
    *("--eval-base-samples", "40", "--length", "10"),
]
INF = math.inf
TARGET = ExactSamples(torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04)


@pytest.fixture(scope="module")
def scorer() -> ToxicityScorer:
    return ToxicityScorer(*load(POCKET / "toxicity"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" red dragon.", True),
        (" Dragon", True),
        (" dragons", False),
        (" snapdragon", False),
        ("dragon-fly", True),
        ("", False),
    ],
)
def test_a_keyword_is_a_whole_word_in_capitals_or_not(text, found):
    assert keyword("dragon").log_phi([text]).tolist() == [0.0 if found else -INF]
    assert keyword("dragon", 5.0).log_phi([text]).tolist() == [0.0 if found else -5.0]


def test_a_keyword_may_hold_signs_that_patterns_use():
    assert keyword("a.b (c)?").log_phi([" a.b (c)?", " axb c"]).tolist() == [0.0, -INF]


def test_a_pattern_is_taken_as_it_stands():
    texts = [" red cat~5: x", " Red cat~5:", " a red cat~5:"]
    assert regex("^ (big|red) cat~5:").log_phi(texts).tolist() == [0.0, -INF, -INF]


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
def test_the_first_sentence_ends_behind_the_prompt_or_has_no_length(text, words):
    expected = [-abs(wanted - words) * 2.0 for wanted in (1, 4, 6)]
    assert [first_sentence(wanted, 2.0).log_phi([text]).item() for wanted in (1, 4, 6)] == expected
    hard = [0.0 if e == 0 else -INF for e in expected]
    assert [first_sentence(wanted).log_phi([text]).item() for wanted in (1, 4, 6)] == hard


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

    factors = [Factor(of_texts), Factor(of_continuations, "continuations"), Factor(of_tokens, "tokens")]
    potential = TextPotential(factors, letters, torch.tensor([1, 2]))
    log_phi = potential(torch.tensor([[3, 4], [5, 6], [3, 4]]))
    assert asked["texts"] == ["b c d e", "b c f g"] and asked["tokens"] == [[3, 4], [5, 6], [3, 4]]
    assert asked["continuations"] == [" d e", " f g"], "the prompt is left out, equal texts are read once"
    assert log_phi.tolist() == [-301.0, -511.0, -301.0]


def test_toxicity_is_what_it_was_and_one_pass_serves_both_directions(scorer, monkeypatch):
    texts = ["Once upon a time, there was a fat ugly pig.", "Once upon a time, there was a kind girl."]
    calls, run, wanted = [], scorer.run, 10.0 * scorer(texts)
    monkeypatch.setattr(scorer, "run", lambda texts: calls.append(texts) or run(texts))
    monkeypatch.setattr(scorer, "logits", LastCall(scorer.logits), raising=False)
    toxic, safe = (factor.log_phi(texts) for factor in make_factors(["toxicity", "nontoxicity"], 10.0, scorer))
    assert torch.equal(toxic, wanted) and torch.equal(10.0 * scorer(texts), wanted)
    torch.testing.assert_close(toxic.div(10).exp() + safe.div(10).exp(), torch.ones(2))
    assert toxic[0] > toxic[1] and safe[0] < safe[1]
    assert len(calls) == 1, "the logits of the last texts are kept"
    scorer(texts[:1])
    assert len(calls) == 2


def test_beta_is_the_classifiers_alone(scorer):
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


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("", "give toxicity, nontoxicity"),
        ("toxic", "give toxicity, nontoxicity"),
        ("toxicity:3", "give toxicity, nontoxicity"),
        ("keyword", "give toxicity, nontoxicity"),
        ("keyword:", "give toxicity, nontoxicity"),
        ("keyword~:cat", "strength"),
        ("keyword~-1:cat", "strength"),
        ("keyword~nan:cat", "strength"),
        ("keyword~inf:cat", "strength"),
        ("first-sentence:0", "number of words"),
        ("first-sentence:many", "number of words"),
        ("regex:(", "no regular expression"),
        ("no/such.py:log_phi", "no/such.py is no file"),
    ],
)
def test_what_cannot_be_understood_is_one_line(scorer, spec, part):
    with pytest.raises(InputError, match=r"^--potential ") as caught:
        make_factors([spec], 1.0, scorer)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@given(spec=strategies.text(strategies.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"])))
@settings(max_examples=50, deadline=None)
def test_any_option_is_understood_or_refused_in_one_line(scorer, spec):
    for text in (spec, f"regex:{spec}", f"keyword~{spec}", f"first-sentence:{spec}"):
        try:
            make_factors([text], 1.0, scorer)
        except InputError as error:
            assert "\n" not in str(error) and "--potential" in str(error)


OWN = """
import sys
import numpy, torch

def doubled(texts): return [-2.0 * len(text) for text in texts]
def array(texts): return numpy.array([-len(text) for text in texts])
def tensor(texts): return torch.tensor([-1.0 * len(text) for text in texts], requires_grad=True)
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
def printing(texts):
    print("said")
    return [-1.0] * len(texts)

def nan(texts): return [float("nan")] * len(texts)
def infinite(texts): return [float("inf")] * len(texts)
def column(texts): return torch.zeros(len(texts), 1)
def one(texts): return 0.0
def strings(texts): return list(texts)
def nothing(texts): pass
def raising(texts):
    raise ValueError("first line\\nsecond line")
def without(): return 0
def leaving(texts): sys.exit(0)
def complex(texts): return torch.ones(len(texts), dtype=torch.complex64)
def meta(texts): return torch.empty(len(texts), device="meta")
def sparse(texts): return torch.zeros(len(texts)).to_sparse()
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
        *(
            ("doubled", [-14.0, -14.0]),
            ("array", [-7.0, -7.0]),
            ("tensor", [-7.0, -7.0]),
            ("of_continuations", [4.0, 4.0]),
        ),
        *(("of_tokens", [-7.0, -11.0]), ("ruled_out", [-INF, -INF]), ("counted", [0.0, 0.0])),
        *(("zeroing", [-2.0, -2.0]), ("clearing", [-5.0, -5.0]), ("backwards", [-2.0, -1.0])),
    ],
)
def test_a_function_of_the_users_own(own, scorer, name, log_phi):
    """It may return what it likes, gets a copy of what its attribute `reads` names, and --beta leaves it alone."""
    potential = TextPotential(make_factors([f"{own}:{name}"], 10.0, scorer), letters, torch.tensor([1, 2]))
    value = potential(tokens := torch.tensor([[3, 4], [5, 6]]))
    assert value.tolist() == log_phi and value.dtype == torch.float32 and not value.requires_grad
    assert tokens.tolist() == [[3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nan", "returned nan for 'b c d e'"),
        ("infinite", "returned inf for 'b c d e'"),
        ("column", "shape [1, 1] for 1 texts"),
        ("one", "shape [] for 1 texts"),
        ("strings", "list that holds no numbers"),
        ("nothing", "NoneType that holds no numbers"),
        ("raising", "ValueError: first line)"),
        ("without", "TypeError"),
        ("leaving", "SystemExit: 0"),
        ("complex", "Tensor that holds no numbers"),
        ("meta", "Tensor that holds no numbers"),
        ("sparse", "Tensor that holds no numbers"),
        ("misread", "misread.reads is 'words'; give one of texts, continuations, tokens"),
        ("number", "no function named 'number'"),
        ("absent", "no function named 'absent'"),
        ("", "no function named ''"),
    ],
)
def test_what_is_wrong_with_a_users_function_is_one_line(own, scorer, name, part):
    with pytest.raises(InputError) as caught:
        factors = make_factors([f"{own}:{name}"], 1.0, scorer)
        TextPotential(factors, letters, torch.tensor([1, 2]))(torch.tensor([[3, 4]]))
    message = str(caught.value)
    assert message.startswith(f"--potential {own}:{name}") and part in message and "\n" not in message


def test_what_a_users_function_prints_is_no_result(own, scorer, capsys):
    factor = make_factors([f"{own}:printing"], 1.0, scorer)[0]
    assert factor.log_phi(["a"]).tolist() == [-1.0]
    assert capsys.readouterr() == ("", "said\n")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="searches are bounded by a signal")
@pytest.mark.parametrize("pattern", [r"(\w+\s?)+$", r"(.*)*\d$"])
def test_a_pattern_that_would_search_for_hours_is_one_line(scorer, monkeypatch, pattern):
    monkeypatch.setattr(potentials, "PATIENCE", 0.2)
    text = "a little girl who liked to play in the garden!"
    with pytest.raises(InputError) as caught:
        make_factors([f"regex:{pattern}"], 1.0, scorer)[0].log_phi([text])
    assert repr(pattern) in str(caught.value) and text in str(caught.value)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert make_factors(["regex:girl$"], 1.0, scorer)[0].log_phi([" a girl"]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("content", "part"),
    [("x = = 1", "SyntaxError"), ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"), ("1 / 0", "line 1")],
)
def test_a_users_file_that_cannot_be_run_is_one_line(tmp_path, scorer, content, part):
    (tmp_path / "broken.py").write_text(content)
    for _ in range(2):
        with pytest.raises(InputError, match=r"broken\.py cannot be run") as caught:
            make_factors([f"{tmp_path / 'broken.py'}:f"], 1.0, scorer)
        assert part in str(caught.value) and "\n" not in str(caught.value)


def test_a_users_file_is_run_once_and_again_when_it_has_changed(tmp_path, scorer):
    path = tmp_path / "counts.py"
    body = "from pathlib import Path\nlog = Path(__file__).with_suffix('.log')\nlog.open('a').write('x')\n"
    path.write_text(body + "def f(texts): return [-1.0] * len(texts)\ng = f\n")
    make_factors([f"{path}:f", f"{path}:g"], 1.0, scorer)
    assert path.with_suffix(".log").read_text() == "x"
    path.write_text(body + "def f(texts): return [-2.0] * len(texts)\n")
    assert make_factors([f"{path}:f"], 1.0, scorer)[0].log_phi(["a"]).tolist() == [-2.0]


def test_sigma_and_the_identity_of_a_run_follow_the_users_file(own, tmp_path):
    config = RunConfig(potential=("toxicity", f"{own}:array"))
    key, names = sigma_key(config, "One"), identity(config)
    assert key.potential[0] == "toxicity" and str(own) in names
    own.write_text(OWN + "#")
    assert sigma_key(config, "One") != key and identity(config)[str(own)] != names[str(own)]
    own.rename(tmp_path / "moved.py")
    (tmp_path / "moved.py").write_text(OWN)
    moved = f"{tmp_path / 'moved.py'}:array"
    assert fingerprints(["toxicity", moved]) == key.potential, "the place of the file does not matter"


def test_samples_of_another_potential_are_passed_over_and_old_files_mean_toxicity(tmp_path):
    key = TargetKey("a" * 64, "b" * 64, "Once", 3, 10.0)
    save_target(tmp_path, TARGET, key)
    raw = json.loads((tmp_path / "target.json").read_text())
    assert raw["key"].pop("potential") == ["toxicity"]
    (tmp_path / "target.json").write_text(json.dumps(raw))
    assert load_target(tmp_path, key) is not None
    assert load_target(tmp_path, TargetKey("a" * 64, "b" * 64, "Once", 3, 10.0, ["keyword:cat"])) is None
    assert load_setup(RunConfig()).problems[0].exact is not None, "the shipped samples serve the default"


def run_main(out: Path, *arguments: object) -> dict:
    """results.json of a small run."""
    main([*SMALL, "--out", str(out), *map(str, arguments)])
    return json.loads((out / "results.json").read_text())


def test_a_hard_keyword_with_a_soft_one_after_two_prompts(tmp_path, capsys):
    """phi is zero for many base samples, and -inf is null in every file."""
    potential = ["regex: (big|little|small)", "keyword~1:girl", "nontoxicity"]
    options = [part for spec in potential for part in ("--potential", spec)]
    prompts = ("--prompt", "Once upon a time, there was a", "--prompt", "Tom saw a")
    results = run_main(tmp_path / "run", *options, *prompts, "--beta", 1, "--eval-target-proposals", 300)
    for result in results["prompts"]:
        assert result["potential"] == potential
        base, target, *rows = result["base"], result["target"], *result["generations"]
        assert base["log_phi"] is None and 0 < base["phi_positive"] < 1 and 0 <= base["toxicity"] <= 1
        for row in (target, *rows):
            assert row["phi_positive"] == 1 and -3 < row["log_phi"] <= 0
        assert all("kl_target_proposal" in row and "model_log_phi" in row for row in rows)
    table = capsys.readouterr().out
    assert "log phi" in table and "phi > 0" in table and "-inf" in table
    samples = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "run/samples.jsonl").open()]
    assert {row["log_phi"] is None for row in samples if row["source"] == "base"} == {True, False}
    assert all(row["log_phi"] is not None for row in samples if row["source"] != "base")


def test_a_potential_above_one_works_without_exact_samples_only(tmp_path, own, capsys):
    potential = ("--potential", f"{own}:of_continuations", "--potential", "keyword~2:girl")
    results = run_main(tmp_path / "run", *potential, "--eval-target-proposals", 0)
    assert "target" not in results and results["base"]["log_phi"] > 0
    assert all("kl_target_proposal" not in row for row in results["generations"])
    assert "KL" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--out", str(tmp_path / "other"), *potential])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and "subtract an upper bound" in line and "or do without exact samples" in line


@pytest.mark.parametrize("spec", ["my.py:nan", "my.py:absent", "none.py:f", "keyword", "regex:("])
def test_a_potential_that_cannot_work_stops_a_run_before_anything_is_written(tmp_path, own, capsys, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--out", "run", "--potential", spec])
    _, line = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and f"--potential {spec}" in line and not Path("run").exists()


def test_numbers_that_json_does_not_know_become_null():
    value = {"a": [-INF, 1.5, {"b": math.nan}], "c": "inf", "d": 3, "e": None}
    assert finite_or_null(value) == {"a": [None, 1.5, {"b": None}], "c": "inf", "d": 3, "e": None}


def test_the_table_and_the_summary_show_log_phi_where_it_is_not_the_toxicity():
    row = {"toxicity": 0.5, "log_phi": -0.7, "phi_positive": 1.0, "log_z_hat_mean": -9.0}
    base = row | {"log_phi": None, "phi_positive": 0.25}
    results = {"prompt": "One", "potential": ["keyword:cat"], "base": base, "generations": [row, row]}
    lines = table(results).splitlines()
    assert lines[0].split("  ")[-1] == "log Z-hat" and "KL" not in lines[0]
    assert lines[1].split() == ["Base", "-inf", "0.250", "0.500", "-9.00"]
    assert lines[2].split() == ["Generation", "0", "-0.70", "1.000", "0.500", "-9.00"]
    summary = summarise([results, results]).splitlines()
    assert summary[1].split() == lines[1].split() and summary[-1].split()[-4:] == ["0.00", "0.000", "0.000", "0.00"]
    titles = [title for title, _, _ in columns(results | {"potential": ["toxicity"], "base": row})]
    assert titles == ["toxicity", "log Z-hat"]


LEARNED = [
    *("--generations", "0", "--pool-base-draws", "2000", "--pool-rounds", "1", "--pool-draws", "500"),
    *("--pool-updates", "40", "--pool-batch-size", "64", "--pool-learning-rate", "3e-4", "--eval-runs", "6"),
    *("--eval-particles", "30", "--eval-base-samples", "300", "--eval-target-proposals", "0", "--seed", "5"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("potential", "satisfied"),
    [
        ("nontoxicity", None),
        ("keyword:dragon", r"(?i)\bdragon\b"),
        ("regex: (red|blue) ", " (red|blue) "),
        ("first-sentence:8", None),
        ("keyword~5:dragon", None),
        ("regex~5:rain", None),
        ("first-sentence~0.5:8", None),
        ("my.py:log_phi", None),
    ],
)
def test_every_row_of_the_table_of_potentials_is_learned(tmp_path, monkeypatch, potential, satisfied):
    """On the pocket preset: hard potentials hold for every sample, soft ones much better than for the base model."""
    (tmp_path / "my.py").write_text("def log_phi(texts): return [-0.5 * text.count('e') for text in texts]\n")
    spec = f"{tmp_path}/{potential}" if potential.startswith("my") else potential
    main([*LEARNED, "--out", str(tmp_path / "run"), "--potential", spec])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    (row,) = results["generations"]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    texts = [sample["text"].removeprefix(results["prompt"]) for sample in samples if sample["source"] != "base"]
    assert row["phi_positive"] == 1 and texts
    if satisfied:
        assert all(re.search(satisfied, text) for text in texts)
    if results["base"]["log_phi"] is not None:
        assert row["log_phi"] > results["base"]["log_phi"] + (0.01 if potential == "nontoxicity" else 0.1)
