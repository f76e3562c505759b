"""The main job at a small scale: its files, its options, and all bad input that it must refuse."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from jobs import DISTILLED, POOLED, products, refusal, run_main
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinystories
from eval.run.options import POCKET, PRESETS, RunConfig, read_config, saved_config
from eval.run.trained import load_twist
from tinystories.checkpoint import read_tensors
from tinystories.errors import InputError


def read(path: Path) -> dict | list[dict]:
    """A JSON file, or one with an object in each line."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_hold_the_promised_rows(results):
    assert set(results) == {"prompt", "potential", "base", "target", "generations"}
    assert {"toxicity", "similarity"} <= results["base"].keys()
    assert {"toxicity", "similarity", "log_z", "num_samples"} <= results["target"].keys()
    assert results["target"]["toxicity"] > 0.5 > 0.1 > results["base"]["toxicity"]
    assert [row["generation"] for row in results["generations"]] == [0, 1]
    for row in results["generations"]:
        assert {"log_z", "log_z_hat_mean", "log_z_hat_std", "dead_runs", "energy"} <= row.keys()
        assert 0 <= row["toxicity"] <= 1 and -1 <= row["similarity"] <= 1
        assert row["kl_target_proposal"] > 0 and row["num_sequences"] == 18
        assert 1 <= row["ess"] <= 6 and 1 / 6 <= row["distinct"] <= 1


def test_every_file_of_a_run_can_be_read_again(finished_run):
    config = read(finished_run / "config.json")
    assert config["seed"] == 0 and config["ctl"]["updates"] == 4 and "torch" in config["versions"]
    assert set(config["networks"]) == {"lm", "toxicity_model", "similarity_model"}
    metrics = read(finished_run / "metrics.jsonl")
    phases = {f"{record['generation']} {record['phase']} {record['step']}" for record in metrics}
    assert len(phases) == len(metrics) == 17
    assert {"None base samples 1", "0 twist learning 4", "0 evaluation 1", "1 sampling 1"} < phases
    assert {"1 distillation 4", "1 twist learning 4", "1 bare model 1"} < phases
    samples = read(finished_run / "samples.jsonl")
    assert sum(row["source"] == "generation 1" for row in samples) == 18
    assert all(row["text"].startswith("Once upon a time, there was a") for row in samples)
    for name in ("similarity-toxicity", "twist-learning", "toxicity-histogram"):
        assert (finished_run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in finished_run.rglob(".*")] == [".lock"]
    assert not (finished_run / "resume").exists()


def test_a_saved_generation_loads_here_and_in_transformers(finished_run, pocket_lm):
    directory = finished_run / "generation-1"
    model, tokenizer = tinystories.load(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl who was mean."
    ids = torch.tensor([tokenizer.encode(text).ids])
    assert AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
        assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()
        assert load_twist(directory)(model.hidden(ids)).shape == ours.shape
    assert not torch.equal(pocket_lm[0].wte.weight, model.wte.weight), "distillation did nothing"


@pytest.mark.parametrize("options", [DISTILLED, POOLED], ids=["distilled", "pooled"])
def test_a_seed_determines_every_byte(tmp_path, capfd, options):
    """And standard error has the number of each phase, or nothing at all."""
    quiet, loud, other = (tmp_path / name for name in ("quiet", "loud", "other"))
    run_main([*options, "--out", quiet])
    said = capfd.readouterr()
    assert said.err == "" and "Generation 1" in said.out and str(quiet) in said.out
    run_main([*options, "--no-quiet", "--out", loud])
    assert products(quiet) == products(loud)
    total = len(
        {(record["generation"], record["phase"]) for record in read(loud / "metrics.jsonl")}
    )
    numbers = set(re.findall(r"(\d+)/(\d+)  ", capfd.readouterr().err))
    assert numbers == {(str(number + 1), str(total)) for number in range(total)}
    run_main([*options, "--generations", 0, "--seed", 1, "--out", other])
    assert read(quiet / "samples.jsonl")[-1]["text"] != read(other / "samples.jsonl")[-1]["text"]
    assert read(quiet / "results.json")["base"] != read(other / "results.json")["base"]


def test_lora_trains_only_query_and_value(tmp_path, pocket_lm):
    run_main([*DISTILLED, "--lora", "--out", tmp_path / "run"])
    after = tinystories.load(tmp_path / "run" / "generation-1")[0].state_dict()
    before = pocket_lm[0].state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if re.search("(q|v)_proj.weight", name)}


def test_a_prompt_a_length_and_a_model_of_ones_own(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(POCKET / "lm", tmp_path / "mine")
    own = ["--lm", tmp_path / "mine", "--prompt", "The cat", "--length", 3]
    run_main([*DISTILLED, *own, "--generations", 0, "--out", run])
    assert read(run / "results.json")["prompt"] == "The cat"
    assert all(row["text"].startswith("The cat") for row in read(run / "samples.jsonl"))
    key = read(run / "target" / "target.json")["key"]
    assert key["prompt"] == "The cat" and key["length"] == 3
    assert read_tensors(run / "target" / "samples.safetensors")["tokens"].shape[1] == 3


def test_bfloat16_is_the_type_of_what_is_sampled(tmp_path):
    run_main([*DISTILLED, "--dtype", "bfloat16", "--out", tmp_path / "run"])
    saved = read_tensors(tmp_path / "run" / "generation-1" / "model.safetensors")
    base = read_tensors(POCKET / "lm" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    assert any(not torch.equal(saved[name], base[name].bfloat16().float()) for name in base)
    for row in read(tmp_path / "run" / "results.json")["generations"]:
        assert row["kl_target_proposal"] < 2 and -4 < row["log_z"] < 0


def test_potentials_are_multiplied_and_a_hard_one_is_counted(tmp_path, capsys):
    (tmp_path / "own.py").write_text("def short(texts):\n    return [-len(t) / 50 for t in texts]")
    factors = ["regex: n", "keyword~3:named", f"{tmp_path / 'own.py'}:short"]
    options = [word for factor in factors for word in ("--potential", factor)]
    run_main([*DISTILLED, *options, "--out", tmp_path / "run"])
    assert "log phi  phi > 0" in capsys.readouterr().out
    for row in read(tmp_path / "run" / "samples.jsonl"):
        text = row["text"].removeprefix("Once upon a time, there was a")
        log_phi = -len(row["text"]) / 50 - 3 * ("named" not in text)
        assert row["log_phi"] == (pytest.approx(log_phi, abs=1e-5) if " n" in text else None)
    results = read(tmp_path / "run" / "results.json")
    assert results["potential"] == factors
    rates = [row["phi_positive"] for row in results["generations"]]
    assert results["target"]["phi_positive"] == 1 > results["base"]["phi_positive"] < min(rates)


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (POOLED, "none of the 50 sequences drawn has phi > 0; draw more, or soften the potential"),
        (DISTILLED, "0 of 20 base samples have phi > 0, too few to learn from; .*--method pooled"),
    ],
)
def test_a_target_that_nothing_reaches_says_what_to_change(tmp_path, capsys, options, end):
    with pytest.raises(SystemExit) as ended:
        run_main([*options, "--potential", "keyword:zyzzyva", "--out", tmp_path / "run"])
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and re.search(end, said[-1])
    assert re.search("0 of 60 base samples.*no row Target.*--eval-target-proposals", said[0])
    assert "0 of 20 base samples have phi > 0: about 0.0 of the" in said[1]


def test_as_published_and_without_exact_samples(tmp_path, capsys):
    options = ["--as-published", "--generations", 0, "--eval-target-proposals", 0]
    run_main([*DISTILLED, *options, "--out", tmp_path / "run"])
    config = saved_config(tmp_path / "run")
    assert (config.resampling, config.ess_threshold, config.moves) == ("multinomial", 1.0, 0)
    said = capsys.readouterr().out
    assert "Generation 0" in said and "Target" not in said and "KL" not in said
    with pytest.raises(InputError, match="--as-published sets --ess-threshold itself"):
        read_config(["--as-published", "--ess-threshold", "0.5"], "")


def test_defaults_are_those_of_the_method_and_the_preset():
    config = read_config([], "")[0]
    assert config == RunConfig() and config.particles == 50 and config.method == "distilled"
    assert read_config(["--preset", "paper"], "")[0].particles == 100
    assert read_config(["--preset", "paper", "--particles", "7"], "")[0].particles == 7


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--beta", -1], ["--beta", "at least 0"]),
        (["--beta", "inf"], ["--beta", "finite"]),
        (["--beta", "many"], ["--beta", "many"]),
        (["--particles", 0], ["--particles", "at least 1"]),
        (["--ess-threshold", 2], ["--ess-threshold", "at most 1"]),
        (["--preset", "huge"], ["--preset", "pocket"]),
        (["--particels", 5], ["--particels", "--help"]),
        (["--ctl-hidden-units", 10**20], ["--ctl-hidden-units", "at most 1000000000"]),
        (["--prompt", ""], ["the prompt is empty"]),
        (["--prompt", "a\x1b[2J"], ["--prompt", "cannot be printed"]),
        (["--prompt", "a " * 200], ["the prompt (", "shorten"]),
        (["--length", 500], ["the length (500)", "shorten"]),
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


@pytest.fixture
def copied(tmp_path) -> Path:
    """A copy of the pocket checkpoints that a test may damage."""
    return shutil.copytree(POCKET, tmp_path / "pocket")


@pytest.mark.parametrize("how", ["truncated", "tampered", "missing"])
@pytest.mark.parametrize("role", ["lm", "toxicity", "similarity"])
def test_damaged_weights_are_refused(tmp_path, copied, role, how):
    path = copied / role / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4000] + b"\xff" * 4000 if how == "tampered" else data[:-4000])
    if how == "missing":
        path.unlink()
    flag = "--lm" if role == "lm" else f"--{role}-model"
    assert f"{path}: " in refusal("--out", tmp_path / "run", flag, copied / role)


def test_a_stale_target_is_refused(tmp_path, copied, monkeypatch):
    path = copied / "target" / "target.json"
    raw = read(path)
    path.write_text(json.dumps(raw | {"key": raw["key"] | {"toxicity": "0" * 64}}))
    preset = dataclasses.replace(PRESETS["pocket"], target=path.parent)
    monkeypatch.setitem(PRESETS, "pocket", preset)
    line = refusal("--out", tmp_path / "run")
    assert f"{path}: stale" in line and "eval.pocket target" in line
