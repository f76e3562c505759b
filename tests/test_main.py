"""The main job at a small scale: its files, its options, and all bad input that it must refuse."""

import json
import re
from pathlib import Path

import pytest
import torch
from jobs import JOBS, POOLED, PUBLISHED, products, refusal, run_main
from networks import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
import tinystories
from eval import load_run
from eval.run.evaluate import finish_generation
from eval.run.options import POCKET, saved_config
from eval.trained import read_network
from tinystories.checkpoint import read_tensors
from tsmc.proposal import proposal_log_probs
from twist.pair import Pair, load_pair


def read(path: Path) -> dict | list[dict]:
    """A JSON file, or one with an object in each line."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_files_of_a_run_hold_what_is_promised(finished_run):
    results = read(finished_run / "results.json")
    assert results["target"]["toxicity"] > 0.5 > 0.1 > results["base"]["toxicity"]
    assert [row["generation"] for row in results["generations"]] == [0, 1]
    for row in results["generations"]:
        assert {"log_z", "log_z_hat_mean", "log_z_hat_std", "dead_runs", "energy"} <= row.keys()
        assert 0 <= row["toxicity"] <= 1 and -1 <= row["similarity"] <= 1
        assert row["kl_target_proposal"] > 0 and row["num_sequences"] == 18
        assert 1 <= row["ess"] <= 6 and 1 / 6 <= row["distinct"] <= 1
    config = read(finished_run / "config.json")
    assert config["seed"] == 0 and config["ctl_updates"] == 3 and "torch" in config["versions"]
    assert set(config["networks"]) == {"lm", "toxicity_model", "similarity_model"}
    metrics = read(finished_run / "metrics.jsonl")
    phases = {f"{record['generation']} {record['phase']} {record['step']}" for record in metrics}
    assert len(phases) == len(metrics) == 13
    assert {"None base samples 1", "0 twist learning 3", "0 evaluation 1"} < phases
    assert {"1 sampling 1", "1 distillation 3", "1 twist learning 3"} < phases
    samples = read(finished_run / "samples.jsonl")
    assert sum(row["source"] == "generation 1" for row in samples) == 18
    assert all(row["text"].startswith("Once upon a time, there was a") for row in samples)
    for name in ("similarity-toxicity", "learning", "toxicity-histogram"):
        assert (finished_run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in finished_run.rglob(".*")] == [".lock"]
    assert not (finished_run / "resume").exists()


def run_and_load(options: list, out: Path) -> list[Pair]:
    """Make a run and assert that its generations load as they were; returns its pairs."""
    pairs = []

    def finish(run, setup, config, m: int, pair: Pair, results: dict) -> None:
        finish_generation(run, setup, config, m, pair, results)
        again = load_pair(out / f"generation-{m}", setup.base, read_network)
        tokens = torch.arange(40, 60).view(4, 5)
        found, wanted = (proposal_log_probs(one.model, one.twist, tokens) for one in (again, pair))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        pairs.append(pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "finish_generation", finish)
        run_main([*options, "--out", out])
    drawn = load_run(out).sample(particles=3, runs=2)
    assert len(drawn.texts) == 6 and drawn.log_z_hat < 0
    return pairs


VARIANTS = {  # options, and what a generation's twist or adapter consists of
    "LoRA": ([*PUBLISHED, "--student", "lora"], {"mlp"}),
    "drifting": ([*PUBLISHED, "--no-effective-potential"], {"mlp"}),
    "narrow": ([*PUBLISHED, "--dtype", "bfloat16"], {"mlp"}),
    "pooled": (POOLED, {"scores", "shift.mlp"}),
    "pooled, narrow": ([*POOLED, "--dtype", "bfloat16"], {"scores", "shift.mlp"}),
    "one round": ([*POOLED, "--pool-first-rounds", "1"], {"scores", "shift.mlp"}),
    "no surrogate": ([*POOLED, "--no-surrogate"], {"shift.mlp"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_learns_and_loads_as_it_was(tmp_path, name):
    options, tensors = VARIANTS[name]
    first, second = run_and_load(options, tmp_path / "run")
    for m, pair in enumerate((first, second)):
        directory = tmp_path / "run" / f"generation-{m}"
        (path,) = directory.glob("[at]*.safetensors")
        names = {re.sub(r"(first|second|last)\.\w+", "mlp", name) for name in read_tensors(path)}
        assert names == tensors
        assert (pair.twist is None) == ("shift.mlp" in tensors)
        learned = pair.model.adapter.shift if pair.twist is None else pair.twist
        assert learned.last.weight.any()
        is_fine_tuned = m == 1 and pair.twist is not None
        assert (directory / "config.json").exists() == is_fine_tuned


@pytest.mark.parametrize("student", ["full", "lora"])
def test_a_fine_tuned_generation_loads_in_transformers(tmp_path, student):
    run_main([*PUBLISHED, "--student", student, "--out", tmp_path / "run"])
    directory = tmp_path / "run" / "generation-1"
    model, tokenizer = tinystories.load(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl who was mean."
    ids = torch.tensor([tokenizer.encode(text).ids])
    assert AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        assert_close(model(ids), theirs(ids).logits)
    before, after = tinystories.load(POCKET / "lm")[0].state_dict(), model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    wanted = "(q|v)_proj.weight" if student == "lora" else "wte|wpe|proj|fc|ln_"
    assert changed and changed == {name for name in after if re.search(wanted, name)}


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_a_seed_determines_every_byte(tmp_path, capfd, options):
    quiet, loud, other = (tmp_path / name for name in ("quiet", "loud", "other"))
    run_main([*options, "--out", quiet])
    assert capfd.readouterr().err == ""
    run_main([*options, "--no-quiet", "--out", loud])
    assert products(quiet) == products(loud)
    shown = capfd.readouterr().err
    for row in read(loud / "metrics.jsonl"):
        place = "" if row["generation"] is None else f"generation {row['generation']}, "
        assert re.search(rf"phase \d+ of \d+, {place}{row['phase']}, \d+ s, ", shown)
    run_main([*options, "--generations", 0, "--seed", 1, "--out", other])
    assert read(quiet / "samples.jsonl")[-1]["text"] != read(other / "samples.jsonl")[-1]["text"]


def test_potentials_are_multiplied_and_a_hard_one_is_counted(tmp_path, capsys):
    """The classifier is neither loaded nor shown where phi does not read it."""
    (tmp_path / "own.py").write_text("def short(texts):\n    return [-len(t) / 50 for t in texts]")
    factors = ["regex: n", "keyword~3:named", f"{tmp_path / 'own.py'}:short"]
    options = [word for factor in factors for word in ("--potential", factor)]
    nowhere = ["--toxicity-model", tmp_path / "nowhere"]
    run_main([*POOLED, *options, *nowhere, "--out", tmp_path / "run"])
    printed = capsys.readouterr().out
    assert "log phi  phi > 0" in printed and "toxicity" not in printed
    for row in read(tmp_path / "run" / "samples.jsonl"):
        text = row["text"].removeprefix("Once upon a time, there was a")
        log_phi = -len(row["text"]) / 50 - 3 * (re.search(r"\bnamed\b", text) is None)
        assert row["log_phi"] == (pytest.approx(log_phi, abs=1e-5) if " n" in text else None)
    results = read(tmp_path / "run" / "results.json")
    assert results["potential"] == factors
    rates = [row["phi_positive"] for row in results["generations"]]
    assert results["target"]["phi_positive"] == 1 > results["base"]["phi_positive"] < min(rates)
    assert "toxicity_model" in refusal(*POOLED, *options, *nowhere, "--toxicity").replace("-", "_")


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (POOLED, "none of the 50 sequences drawn has phi > 0; draw more, or soften the potential"),
        (PUBLISHED, "0 of 20 .*too few to learn from; add --learner pooled, soften "),
    ],
)
def test_a_target_that_nothing_reaches_says_what_to_change(tmp_path, capsys, options, end):
    with pytest.raises(SystemExit) as ended:
        run_main([*options, "--potential", "keyword:zyzzyva", "--out", tmp_path / "run"])
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and re.search(end, said[-1])
    assert "0 of 20 base samples have phi > 0: about 0.0 of the" in said[0]
    if options is POOLED:  # the published learner has ended before exact samples are drawn
        assert re.search("0 of 60 base samples.*no row Target.*--eval-target-proposals", said[1])


def test_as_published_and_without_exact_samples(tmp_path, capsys):
    options = [*PUBLISHED, "--as-published", "--eval-target-proposals", 0]
    run_and_load(options, tmp_path / "run")
    config = saved_config(tmp_path / "run")
    rule = (config.learner, config.resampling, config.ess_threshold)
    assert rule == ("published", "multinomial", 1.0)
    said = capsys.readouterr().out
    assert "Generation 1" in said and "Target" not in said and "KL" not in said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--beta", -1], ["--beta", "at least 0"]),
        (["--beta", "many"], ["--beta", "many"]),
        (["--prompt", "a\x1b[2J"], ["--prompt", "cannot be printed"]),
        (["--prompt", "a " * 200], ["the prompt (", "shorten"]),
        (["--lm", "no/such/place"], ["no/such/place", "--lm"]),
        (["--device", "abacus"], ["--device", "cpu"]),
        (["--preset", "paper"], ["TinyStories-33M", "--lm"]),
        (["--potential", "kindness"], ["--potential kindness", "keyword:WORD"]),
    ],
)
def test_bad_options_are_refused(tmp_path, arguments, parts, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    line = refusal("--out", tmp_path / "run", *arguments)
    assert all(part in line for part in parts), line
    assert not (tmp_path / "run").exists(), "nothing is written for a run that cannot start"


def test_an_output_directory_that_exists_or_cannot_be_made_is_named(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    assert f"--out {tmp_path}: exists already" in refusal("--out", tmp_path)
    place = tmp_path / "precious.txt" / "run"
    assert f"{place}: cannot be" in refusal("--out", place)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
