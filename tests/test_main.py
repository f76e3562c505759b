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
from eval.run.options import POCKET, PRESETS, RunConfig, flags, read_config, saved_config
from eval.run.trained import load_twist
from tinystories.checkpoint import read_tensors
from tinystories.errors import InputError


def read(path: Path) -> dict:
    """A JSON file."""
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict]:
    """The lines of a file, each a JSON object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_hold_the_promised_rows(results):
    assert set(results) == {"prompt", "potential", "base", "target", "generations"}
    assert {"toxicity", "similarity"} <= results["base"].keys()
    assert {"toxicity", "similarity", "log_z", "num_samples"} <= results["target"].keys()
    assert [row["generation"] for row in results["generations"]] == [0, 1]
    for row in results["generations"]:
        assert {"toxicity", "log_z", "log_z_hat_std", "dead_runs", "energy"} <= row.keys()
        assert 0 <= row["toxicity"] <= 1 and -1 <= row["similarity"] <= 1
        assert row["kl_target_proposal"] > 0 and row["num_sequences"] == 18
        assert 1 <= row["ess"] <= 6 and 1 / 6 <= row["distinct"] <= 1
    assert results["target"]["toxicity"] > 0.5 > 0.1 > results["base"]["toxicity"]


def test_every_file_of_a_run_can_be_read_again(finished_run):
    config = read(finished_run / "config.json")
    assert config["seed"] == 0 and config["ctl"]["updates"] == 4 and "torch" in config["versions"]
    assert set(config["networks"]) == {"lm", "toxicity_model", "similarity_model"}
    metrics = read_lines(finished_run / "metrics.jsonl")
    counts = {(record["generation"], record["phase"]): record["step"] for record in metrics}
    assert counts == {
        (None, "base samples"): 1,
        (0, "twist learning"): 4,
        (0, "evaluation"): 1,
        (1, "sampling"): 1,
        (1, "distillation"): 4,
        (1, "twist learning"): 4,
        (1, "evaluation"): 1,
        (1, "bare model"): 1,
    }
    samples = read_lines(finished_run / "samples.jsonl")
    assert sum(row["source"] == "generation 1" for row in samples) == 18
    assert all(row["text"].startswith("Once upon a time, there was a") for row in samples)
    for name in ("similarity-toxicity", "twist-learning", "toxicity-histogram"):
        content = (finished_run / "figures" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
    assert [path.name for path in finished_run.rglob(".*")] == [".lock"]
    assert not (finished_run / "resume").exists()


def test_a_saved_generation_loads_here_and_in_transformers(finished_run):
    directory = finished_run / "generation-1"
    model, tokenizer = tinystories.load(directory)
    twist = load_twist(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl who was mean."
    ids = torch.tensor([tokenizer.encode(text).ids])
    assert AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
        assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()
        assert twist(model.hidden(ids)).shape == ours.shape
    base, _ = tinystories.load(POCKET / "lm")
    assert not torch.equal(base.wte.weight, model.wte.weight), "distillation changed nothing"


@pytest.mark.parametrize("options", [DISTILLED, POOLED], ids=["distilled", "pooled"])
def test_a_seed_determines_every_byte(tmp_path, capfd, options):
    """And standard error has the number of each phase, or nothing at all."""
    run_main([*options, "--out", tmp_path / "quiet"])
    said = capfd.readouterr()
    assert said.err == "" and "Generation 1" in said.out and str(tmp_path / "quiet") in said.out
    run_main([*options, "--no-quiet", "--out", tmp_path / "loud"])
    numbers = re.findall(r"(\d+)/(\d+)  ", capfd.readouterr().err)
    metrics = read_lines(tmp_path / "loud" / "metrics.jsonl")
    phases = {(record["generation"], record["phase"]) for record in metrics}
    assert {tuple(map(int, pair)) for pair in numbers} == {
        (number, len(phases)) for number in range(1, len(phases) + 1)
    }
    assert products(tmp_path / "quiet") == products(tmp_path / "loud")
    run_main([*options, "--generations", 0, "--seed", 1, "--out", tmp_path / "other"])
    texts = [
        [
            row["text"]
            for row in read_lines(tmp_path / name / "samples.jsonl")
            if "base" in row["source"]
        ]
        for name in ("quiet", "other")
    ]
    assert len(texts[0]) == len(texts[1]) and texts[0] != texts[1]


def test_lora_trains_only_query_and_value(tmp_path):
    run_main([*DISTILLED, "--lora", "--out", tmp_path / "run"])
    model, _ = tinystories.load(tmp_path / "run" / "generation-1")
    base, _ = tinystories.load(POCKET / "lm")
    before = base.state_dict()
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    projections = ("q_proj", "v_proj")
    assert changed == {f"h.{i}.attn.{p}.weight" for i in range(len(base.h)) for p in projections}


def test_a_prompt_a_length_and_a_model_of_ones_own(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(POCKET / "lm", tmp_path / "mine")
    own = ["--lm", tmp_path / "mine", "--prompt", "The cat", "--length", 3]
    run_main([*DISTILLED, *own, "--generations", 0, "--out", run])
    assert read(run / "results.json")["prompt"] == "The cat"
    tokenizer = tinystories.load(run / "generation-0")[1]
    for row in read_lines(run / "samples.jsonl"):
        assert row["text"].startswith("The cat")
        assert len(tokenizer.encode(row["text"]).ids) <= len(tokenizer.encode("The cat").ids) + 3
    key = read(run / "target" / "target.json")["key"]
    assert key["prompt"] == "The cat" and key["length"] == 3


def test_bfloat16_is_the_type_of_what_is_sampled(tmp_path):
    run_main([*DISTILLED, "--dtype", "bfloat16", "--out", tmp_path / "run"])
    saved = read_tensors(tmp_path / "run" / "generation-1" / "model.safetensors")
    base = read_tensors(POCKET / "lm" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    assert any(not torch.equal(saved[name], base[name].bfloat16().float()) for name in base)
    for row in read(tmp_path / "run" / "results.json")["generations"]:
        assert row["kl_target_proposal"] < 2 and -4 < row["log_z"] < 0


def test_potentials_are_multiplied_and_a_hard_one_is_counted(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "def short(texts):\n    return [-len(t) / 50 for t in texts]\n"
    )
    run = tmp_path / "run"
    factors = ["regex: n", "keyword~3:named", f"{tmp_path / 'own.py'}:short"]
    options = [word for factor in factors for word in ("--potential", factor)]
    run_main([*DISTILLED, *options, "--out", run])
    said = capsys.readouterr()
    assert "log phi  phi > 0" in said.out
    for row in read_lines(run / "samples.jsonl"):
        text = row["text"].removeprefix("Once upon a time, there was a")
        expected = -len(row["text"]) / 50 - 3 * ("named" not in text)
        is_possible = " n" in text
        assert row["log_phi"] == (pytest.approx(expected, abs=1e-5) if is_possible else None)
    results = read(run / "results.json")
    assert results["potential"] == factors
    rates = [row["phi_positive"] for row in results["generations"]]
    assert results["target"]["phi_positive"] == 1 > results["base"]["phi_positive"] < min(rates)


def test_without_exact_samples_there_is_no_target_and_no_kl(tmp_path, capsys):
    options = ["--generations", 0, "--eval-target-proposals", 0, "--no-effective-potential"]
    run_main([*DISTILLED, *options, "--out", tmp_path / "run"])
    said = capsys.readouterr().out
    assert "Generation 0" in said and "Target" not in said and "KL" not in said
    assert set(read(tmp_path / "run" / "results.json")) == {
        "prompt",
        "potential",
        "base",
        "generations",
    }


def test_a_run_without_standard_error_comes_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    run_main([*DISTILLED, "--no-quiet", "--generations", 0, "--out", tmp_path / "run"])
    assert (tmp_path / "run" / "results.json").exists()


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
    assert ended.value.code == 2
    assert re.search("0 of 60 base samples.*no row Target.*--eval-target-proposals", said[0])
    assert re.search("0 of 20 base samples have phi > 0: about 0.0 of the", said[1])
    assert re.search(end, said[-1])


def test_as_published_is_the_papers_rule(tmp_path):
    run_main([*DISTILLED, "--as-published", "--generations", 0, "--out", tmp_path / "run"])
    config = saved_config(tmp_path / "run")
    assert (config.resampling, config.ess_threshold, config.moves) == ("multinomial", 1.0, 0)
    config = read_config([], "")[0]
    assert (config.method, config.ess_threshold, config.moves) == ("distilled", 0.0, 1)
    with pytest.raises(InputError, match="--as-published sets --ess-threshold itself"):
        read_config(["--as-published", "--ess-threshold", "0.5"], "")


def test_every_option_has_help():
    for _, flag, item in flags():
        assert len(item.metadata["help"]) > 2, flag


def test_the_paper_trains_with_its_own_number_of_particles():
    assert read_config(["--preset", "paper"], "")[0].particles == 100
    assert read_config(["--preset", "paper", "--particles", "7"], "")[0].particles == 7
    assert read_config([], "")[0].particles == RunConfig().particles == 50


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--beta", -1], ["--beta", "at least 0"]),
        (["--beta", "nan"], ["--beta", "finite"]),
        (["--beta", "inf"], ["--beta", "finite"]),
        (["--beta", "many"], ["--beta", "many"]),
        (["--particles", 0], ["--particles", "at least 1"]),
        (["--ess-threshold", 2], ["--ess-threshold", "at most 1"]),
        (["--preset", "huge"], ["--preset", "pocket"]),
        (["--particels", 5], ["--particels", "--help"]),
        (["--particles", 10**20], ["--particles", "at most 1000000000"]),
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


def test_an_output_directory_that_exists_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    line = refusal("--out", tmp_path)
    assert f"--out {tmp_path}: exists already" in line
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_an_unwritable_output_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    line = refusal("--out", tmp_path / "file" / "run")
    assert str(tmp_path / "file" / "run") in line and "choose another" in line


@pytest.fixture
def copied(tmp_path) -> Path:
    """A copy of the pocket checkpoints that a test may damage."""
    return shutil.copytree(POCKET, tmp_path / "pocket")


@pytest.mark.parametrize("how", ["truncated", "tampered", "missing"])
@pytest.mark.parametrize("role", ["lm", "toxicity", "similarity"])
def test_damaged_weights_are_refused(tmp_path, copied, role, how):
    path = copied / role / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "tampered":
        path.write_bytes(data[:-4000] + b"\xff" * 4000)  # NaN
    flag = "--lm" if role == "lm" else f"--{role}-model"
    assert f"{path}: " in refusal("--out", tmp_path / "run", flag, copied / role)
    assert not (tmp_path / "run").exists()


def test_a_config_that_contradicts_the_weights_names_the_tensor(tmp_path, copied):
    path = copied / "lm" / "config.json"
    path.write_text(json.dumps(read(path) | {"intermediate_size": 100}))
    line = refusal("--out", tmp_path / "run", "--lm", copied / "lm")
    assert "c_fc" in line and "shape" in line


def test_a_stale_target_is_refused(tmp_path, copied, monkeypatch):
    path = copied / "target" / "target.json"
    raw = read(path)
    raw["key"]["toxicity"] = "0" * 64
    path.write_text(json.dumps(raw))
    preset = dataclasses.replace(PRESETS["pocket"], target=path.parent)
    monkeypatch.setitem(PRESETS, "pocket", preset)
    line = refusal("--out", tmp_path / "run")
    assert f"{path}: stale" in line and "eval.pocket target" in line
