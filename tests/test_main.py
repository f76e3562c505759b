"""The main job at a small scale: its files, its options, and all bad input that it must refuse."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from jobs import DISTILLED, POOLED, products, refusal, run_main
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinystories
from eval.run.options import POCKET, PRESETS, RunConfig, flags, read_config
from eval.run.trained import load_twist
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


@pytest.mark.parametrize("options", [DISTILLED, POOLED])
def test_a_seed_determines_every_byte_and_the_progress_counts_the_phases(tmp_path, capfd, options):
    run_main([*options, "--out", tmp_path / "quiet"])
    said = capfd.readouterr()
    assert said.err == "" and "Generation 1" in said.out and str(tmp_path / "quiet") in said.out
    run_main([*options, "--no-quiet", "--out", tmp_path / "loud"])
    said = capfd.readouterr()
    assert products(tmp_path / "quiet") == products(tmp_path / "loud")
    phases = {(record["generation"], record["phase"]) for record in read_lines(tmp_path / "loud" / "metrics.jsonl")}
    numbers = {tuple(map(int, pair)) for pair in re.findall(r"(\d+)/(\d+)  ", said.err)}
    assert numbers == {(i + 1, len(phases)) for i in range(len(phases))}


def test_another_seed_gives_other_samples_of_the_same_target(tmp_path):
    pass
