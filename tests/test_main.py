"""The main job at a small scale: its files, every learner, and the options that it must refuse."""

import json
import re
from pathlib import Path

import pytest
import torch
from jobs import JOBS, products, refusal, run_main
from networks import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinystories
from eval import load_run
from eval.config import POCKET
from eval.figures import draw_figures
from eval.run import Run
from eval.table import read_results
from tinystories.checkpoint import read_tensors
from tsmc.proposal import proposal_log_probs
from twist.pair import Pair


def read(path: Path) -> dict | list[dict]:
    """A JSON file, or one with an object in each line."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_files_of_a_run_hold_what_is_promised(finished_run):
    results = read(finished_run / "results.json")
    assert results["target"]["toxicity"] > 0.5 > 0.1 > results["base"]["toxicity"]
    assert results["target"]["num_samples"] == 60, "those of --target"
    assert (results["learner"], results["scores"]) == ("weighted", 2 * 3 * 20 + 4 * 10)
    assert [row["generation"] for row in results["generations"]] == [0, 1]
    for m, row in enumerate(results["generations"]):
        assert row == read(finished_run / f"generation-{m}" / "row.json")
        assert {"log_z", "log_z_hat_mean", "log_z_hat_std", "dead_runs", "energy"} <= row.keys()
        assert read(finished_run / f"generation-{m}" / "seconds.json")["core_seconds"] > 0
        assert 0 <= row["toxicity"] <= 1 and -1 <= row["similarity"] <= 1
        assert row["kl_target_proposal"] > 0
        assert 1 <= row["ess"] <= 6 and 1 / 6 <= row["distinct"] <= 1
        assert row["populations"].keys() == {"6", "3"}
        assert all(0 <= score <= 1 for score in row["populations"].values())
    config = read(finished_run / "config.json")
    assert config["seed"] == 0 and config["ctl_updates"] == 3 and "torch" in config["versions"]
    assert set(config["networks"]) == {"lm", "toxicity_model", "similarity_model"}
    steps = []
    for folder in ("base", "generation-0", "generation-1"):
        for row in read(finished_run / folder / "metrics.jsonl"):
            steps.append(f"{row['generation']} {row['phase']} {row['step']}")
    assert len(steps) == len({*steps}) == 18
    assert {"None base samples 1", "0 twist learning 3", "0 populations of 3 1"} < {*steps}
    assert {"1 sampling 1", "1 distillation 3", "1 twist learning 3"} < {*steps}
    samples = read(finished_run / "generation-1" / "samples.jsonl")
    assert [row["source"] for row in samples] == ["generation 1"] * 18
    assert all(row["text"].startswith("Once upon a time, there was a") for row in samples)
    figures = {path.name: path.read_bytes() for path in (finished_run / "figures").iterdir()}
    names = {"similarity-toxicity", "learning", "toxicity-histogram", "particles"}
    assert figures.keys() == {f"{name}.png" for name in names}
    assert all(content.startswith(b"\x89PNG") for content in figures.values())
    assert [path.name for path in finished_run.rglob(".*")] == [".lock"]


def run_and_load(options: list, out: Path) -> list[Pair]:
    """Make a run and assert that its generations load as they were; returns its pairs."""
    keep, pairs = Run.keep, []

    def keep_and_load(run, m, pair, world, *rest) -> None:
        keep(run, m, pair, world, *rest)
        again = run.load_pair(m, world)
        tokens = torch.arange(40, 60).view(4, 5)
        found, wanted = (proposal_log_probs(one.model, one.twist, tokens) for one in (again, pair))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        pairs.append(pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "keep", keep_and_load)
        run_main([*options, "--out", out])
    drawn = load_run(out).sample(particles=3, runs=2)
    assert len(drawn.texts) == 6 and drawn.evidence().value < 0
    return pairs


def assert_loads_in_transformers(directory: Path, wanted: str) -> None:
    """Model and tokenizer are those of this project; `wanted` are the tensors that have changed."""
    model, tokenizer = tinystories.load(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl who was mean."
    ids = torch.tensor([tokenizer.encode(text).ids])
    assert AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        assert_close(model(ids), theirs(ids).logits)
    before, after = tinystories.load(POCKET / "lm")[0].state_dict(), model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and changed == {name for name in after if re.search(wanted, name)}


NARROW = ["--dtype", "bfloat16"]
WEIGHTED = JOBS["weighted"]
VARIANTS = {  # options, and what a generation's twist or adapter consists of
    **{name: (JOBS[name], {"mlp"}) for name in ("paper", "weighted")},
    "pooled": (JOBS["pooled"], {"scores", "shift.mlp"}),
    **{name: (JOBS[name], set()) for name in ("dpo", "grpo")},
    "LoRA": ([*WEIGHTED, "--student", "lora"], {"mlp"}),
    "drifting": ([*WEIGHTED, "--no-effective-potential"], {"mlp"}),
    "narrow": ([*WEIGHTED, *NARROW], {"mlp"}),
    "pooled, narrow": ([*JOBS["pooled"], *NARROW], {"scores", "shift.mlp"}),
    "no surrogate": ([*JOBS["pooled"], "--no-surrogate"], {"shift.mlp"}),
    "narrow GRPO by LoRA": ([*JOBS["grpo"], *NARROW, "--student", "lora"], set()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_learns_and_loads_as_it_was(tmp_path, finished_job, name):
    """And a run of the same options elsewhere is the same to the byte."""
    options, tensors = VARIANTS[name]
    pairs = run_and_load(options, tmp_path / "run")
    for m, pair in enumerate(pairs):
        directory = tmp_path / "run" / f"generation-{m}"
        (path,) = directory.glob("[at]*.safetensors")
        found = read_tensors(path)
        assert {re.sub(r"(first|second|last)\.\w+", "mlp", name) for name in found} == tensors
        is_adapter, is_policy = "shift.mlp" in tensors, not tensors
        assert (pair.twist is None) == (is_adapter or is_policy)
        if not is_policy:
            learned = pair.model.adapter.shift if is_adapter else pair.twist
            assert learned.last.weight.any()
        is_fine_tuned = is_policy or (m == 1 and not is_adapter)
        assert (directory / "config.json").exists() == is_fine_tuned
    if name in ("weighted", "pooled", "dpo"):
        assert products(tmp_path / "run") == products(finished_job(name))
    if name in ("weighted", "LoRA", "dpo"):
        wanted = "(q|v)_proj.weight" if name == "LoRA" else "wte|wpe|proj|fc|ln_"
        assert_loads_in_transformers(directory, wanted)
    if name == "dpo":
        draw_figures(read_results(tmp_path / "run"), tmp_path / "run")


def test_another_seed_gives_other_texts_and_a_table_without_exact_samples(
    tmp_path, finished_job, capsys
):
    options = [*JOBS["pooled"], "--generations", 0, "--seed", 1, "--eval-target-proposals", 0]
    run_main([*options, "--out", tmp_path / "run"])
    texts = [
        [row["text"] for row in read(run / "base" / "samples.jsonl") if row["source"] == "base"]
        for run in (tmp_path / "run", finished_job("pooled"))
    ]
    assert len(texts[0]) == len(texts[1]) and texts[0] != texts[1]
    printed = capsys.readouterr()
    assert "Generation 0" in printed.out and "Target" not in printed.out
    assert "KL" not in printed.out and not (tmp_path / "run" / "target").exists()


def test_potentials_are_multiplied_and_a_hard_one_is_counted(tmp_path, capsys):
    """The classifier is neither loaded nor shown where phi does not read it."""
    (tmp_path / "own.py").write_text(
        "def short(texts):\n    return [-len(text) / 50 for text in texts]\n"
        "def price(texts):\n    return [-1.0] * len(texts)\n"
        "price.reads = 'continuations'\n"
    )
    own = [f"{tmp_path / 'own.py'}:{name}" for name in ("short", "price")]
    factors = ["regex: n", "keyword~3:named", *own]
    options = [word for factor in factors for word in ("--potential", factor)]
    nowhere = ["--toxicity-model", tmp_path / "nowhere"]
    run_main([*JOBS["pooled"], *options, *nowhere, "--out", tmp_path / "run"])
    printed = capsys.readouterr()
    assert "log phi  phi > 0" in printed.out and "toxicity" not in printed.out
    assert re.search(r"^generation 0: \d+ s, log phi -.*, about \d+ s left$", printed.err, re.M)
    assert re.search(r"^generation 1: \d+ s, log phi -.*, KL -?[\d.]+$", printed.err, re.M)
    rows = [row for path in tmp_path.glob("run/*/samples.jsonl") for row in read(path)]
    assert {row["source"] for row in rows} == {"base", "target", "generation 0", "generation 1"}
    for row in rows:
        text = row["text"].removeprefix("Once upon a time, there was a")
        log_phi = -1 - len(row["text"]) / 50 - 3 * (re.search(r"\bnamed\b", text) is None)
        assert row["log_phi"] == (pytest.approx(log_phi, abs=1e-5) if " n" in text else None)
    results = read(tmp_path / "run" / "results.json")
    assert results["potential"] == factors
    rates = [row["phi_positive"] for row in results["generations"]]
    assert results["target"]["phi_positive"] == 1 > results["base"]["phi_positive"] < min(rates)
    assert all(score < -1 for score in results["generations"][1]["populations"].values())


@pytest.mark.parametrize(
    ("learner", "end"),
    [
        (
            "pooled",
            "none of the 25 texts drawn first has phi > 0; soften the potential, give it hints",
        ),
        ("weighted", "all 30 runs of 4 particles ended with weight zero; .*soften the potential"),
        ("dpo", "all 120 runs of 1 particles ended with weight zero; .*soften the potential"),
    ],
)
def test_a_target_that_nothing_reaches_says_what_to_change(tmp_path, capsys, learner, end):
    options = [*JOBS[learner], "--eval-runs", 30, "--potential", "regex:zyzzyva"]
    with pytest.raises(SystemExit) as stopped:
        run_main([*options, "--out", tmp_path / "run"])
    _, *said = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and re.search(end, said[-1]), said
    assert "0 of 120 base samples have phi > 0" in said[0]
    assert re.search("0 of 60 base samples.*no row Target.*--eval-target-proposals", said[2])


OWN = "def phi(texts):\n    return [0.0 for _ in texts]\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--beta", -1], ["--beta", "at least 0"]),
        (["--prompt", "a\x1b[2J"], ["--prompt", "cannot be printed"]),
        (["--prompt", "a " * 200], ["the prompt (", "shorten"]),
        (["--end", "THE END"], ["--end THE END", "name one"]),
        (["--lm", "no/such/place"], ["no/such/place", "--lm"]),
        (["--device", "abacus"], ["--device", "cpu"]),
        (["--preset", "paper"], ["TinyStories-33M", "--lm"]),
        (["--potential", "kindness"], ["--potential kindness", "keyword:WORD"]),
        (["--potential", "a/own.py:phi", "--potential", "b/own.py:phi"], ["b/own.py", "rename"]),
        (["--target", "a"], ["a/target.json: no such file"]),
        (["--target", "sixty", "--beta", 9], ["sixty: holds", "another sigma"]),
    ],
)
def test_bad_options_are_refused(tmp_path, arguments, parts, monkeypatch, finished_run):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sixty").symlink_to(finished_run.with_name("sixty"))
    for number, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(OWN + "\n" * number)
    line = refusal("--out", "run", *arguments)
    assert all(part in line for part in parts), line
    assert not (tmp_path / "run").exists(), "nothing is written for a run that cannot start"


def test_an_output_directory_that_exists_or_cannot_be_made_is_named(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    assert f"--out {tmp_path}: exists already" in refusal("--out", tmp_path)
    place = tmp_path / "precious.txt" / "run"
    assert f"{place}: cannot be" in refusal("--out", place)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
