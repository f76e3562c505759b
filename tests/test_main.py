"""The main job at a small scale: its files, its options, and all bad input that it must refuse."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import JOBS, POOLED, UNPOOLED, products, refusal, run_main
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import main
import tinystories
from eval import load_run
from eval.run.evaluate import finish_generation
from eval.run.options import POCKET, read_config, saved_config
from eval.trained import load_generation
from tinystories.checkpoint import read_tensors
from tinystories.errors import InputError
from tinystories.fast import pack
from tsmc.resampling import effective_sample_size
from twist.mlp import TwistMLP
from twist.pool import Pool, Round


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
    assert config["seed"] == 0 and config["value"]["updates"] == 4 and "torch" in config["versions"]
    assert set(config["networks"]) == {"lm", "toxicity_model", "similarity_model"}
    metrics = read(finished_run / "metrics.jsonl")
    phases = {f"{record['generation']} {record['phase']} {record['step']}" for record in metrics}
    assert len(phases) == len(metrics) == 27
    assert {"None base samples 1", "0 sampling 2 1", "0 ladder 1 3", "0 twist learning 3"} < phases
    assert {"1 surrogate 1", "1 distillation 3", "1 value learning 4", "1 bare model 1"} < phases
    samples = read(finished_run / "samples.jsonl")
    assert sum(row["source"] == "generation 1" for row in samples) == 18
    assert all(row["text"].startswith("Once upon a time, there was a") for row in samples)
    for name in ("similarity-toxicity", "twist-learning", "toxicity-histogram"):
        assert (finished_run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in finished_run.rglob(".*")] == [".lock"]
    assert not (finished_run / "resume").exists()


def run_and_load(options: list, out: Path) -> list[nn.Module]:
    """Make a run and assert that its generations load as they were; returns each p, then psi."""
    found = []

    def finish(run, setup, m: int, p: nn.Module, psi: nn.Module, results: dict) -> None:
        finish_generation(run, setup, m, p, psi, results)
        tokens = torch.arange(40, 60).view(4, 5)
        sigma, twist = load_generation(setup, out / f"generation-{m}", m, torch.device("cpu"))
        with torch.no_grad():
            log_p, _, hidden = setup.sigma(p, psi).model.log_probs(tokens)
            assert torch.equal(sigma.model.log_probs(tokens)[0], log_p)
            assert torch.equal(twist(hidden), pack(psi)(hidden))
        found.extend([p, psi])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "finish_generation", finish)
        run_main([*options, "--out", out])
    drawn = load_run(out).sample(particles=3, runs=2)
    assert len(drawn.texts) == 6 and drawn.log_z_hat < 0
    return found


def tensors_of(generation: Path) -> set[str]:
    """Names of what a generation has saved; those of an adapter or twist without their layers."""
    names = {name for path in generation.glob("[at]*.safetensors") for name in read_tensors(path)}
    return {re.sub(r"(first|second|last)\.\w+", "mlp", name) for name in names}


ABLATIONS = {
    "--dtype bfloat16": {"memory", "network.mlp", "scores", "shift.mlp"},
    "--pool-first-rounds 1": {"memory", "network.mlp", "scores", "shift.mlp"},
    "--no-memory": {"network.mlp", "scores", "shift.mlp"},
    "--no-surrogate": {"network.mlp", "shift.mlp"},
    "--no-learn-value": {"memory", "network.mlp", "scores", "shift.mlp"},
    "--no-effective-potential": {"memory", "network.mlp", "scores", "shift.mlp"},
    "--no-pooling": {"mlp", "shift.mlp"},
}


@pytest.mark.parametrize("flags", ABLATIONS)
def test_every_part_can_be_left_out(tmp_path, flags):
    base, first, adapter, psi = run_and_load([*POOLED, *flags.split()], tmp_path / "run")
    generations = [tmp_path / "run" / f"generation-{m}" for m in range(2)]
    assert tensors_of(generations[1]) == ABLATIONS[flags]
    assert tinystories.load(generations[0])[0].wte.weight.equal(base.wte.weight)
    assert not (generations[1] / "config.json").exists()
    assert adapter.shift.last.weight.any()
    if flags == "--no-pooling":
        return
    assert first.adapter.shift.last.weight.any() and psi.adapter is None
    if flags == "--no-learn-value":
        assert not (first.network.last.weight.any() or psi.network.last.weight.any())


def test_line_1_climbs_from_round_to_round(monkeypatch):
    """Rounds come from p^(0) until one has a weight, then from what learned from all before."""
    proposals, learned = [], []

    def add_round(run, setup, q, samples: Pool, m: int, count: int, r: int) -> None:
        proposals.append(q)
        log_phi = torch.full((count,), -torch.inf) if r == 1 else torch.linspace(-9, 0, count)
        samples.rounds.append(Round(torch.zeros(count, 3), log_phi.double(), log_phi.double()))

    def fit_adapter(run, setup, phase: str, samples: Pool, m: int, updates: int, start) -> str:
        alive = (samples.log_weights() > -torch.inf).sum()
        is_tempered = effective_sample_size(samples.log_weights()) >= 0.7 * alive
        learned.append((len(samples.tokens()), start, updates, is_tempered.item()))
        return phase

    monkeypatch.setattr(main, "add_round", add_round)
    monkeypatch.setattr(main, "fit_adapter", fit_adapter)
    sizes = ["--pool-first-draws", "35", "--pool-first-rounds", "4", "--pool-first-ess", "0.7"]
    config, _ = read_config([*sizes, "--pool-first-updates", "5"], "")
    setup = SimpleNamespace(model="p^(0)")
    samples = main.first_samples(SimpleNamespace(config=config), setup)
    assert proposals == ["p^(0)", "p^(0)", "ladder 2", "ladder 3"]
    assert learned == [(18, None, 5, True), (27, "ladder 2", 5, True)]
    assert [len(one.tokens) for one in samples.rounds] == [9, 9, 9, 8]
    no_pool = SimpleNamespace(config=dataclasses.replace(config, pooling=False))
    assert main.first_samples(no_pool, setup).rounds == []


@pytest.mark.parametrize("student", ["full", "lora"])
@pytest.mark.parametrize("job", JOBS)
def test_a_fine_tuned_generation_loads_here_and_in_transformers(tmp_path, job, student):
    base, *_ = run_and_load([*JOBS[job], "--student", student], tmp_path / "run")
    directory = tmp_path / "run" / "generation-1"
    assert tensors_of(directory) == ({"mlp"} if job == "unpooled" else {"memory", "network.mlp"})
    model, tokenizer = tinystories.load(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl who was mean."
    ids = torch.tensor([tokenizer.encode(text).ids])
    assert AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
        assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()
    before, after = base.state_dict(), model.state_dict()
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
        place = "" if row["generation"] is None else f"generation {row['generation']}  "
        assert f"{place}{row['phase']}: " in shown
    run_main([*options, "--generations", 0, "--seed", 1, "--out", other])
    assert read(quiet / "samples.jsonl")[-1]["text"] != read(other / "samples.jsonl")[-1]["text"]


def test_a_prompt_and_a_length_of_ones_own(tmp_path):
    run = tmp_path / "run"
    own = ["--prompt", "The cat", "--length", 3]
    run_main([*POOLED, *own, "--generations", 0, "--out", run])
    assert all(row["text"].startswith("The cat") for row in read(run / "samples.jsonl"))
    assert read_tensors(run / "target" / "samples.safetensors")["tokens"].shape[1] == 3


def test_bfloat16_is_the_type_of_what_is_sampled(tmp_path):
    run_main([*UNPOOLED, "--dtype", "bfloat16", "--out", tmp_path / "run"])
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
    run_main([*POOLED, *options, "--out", tmp_path / "run"])
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
        (UNPOOLED, "0 of 20 .*too few to learn from; soften .*, or leave out --no-pooling$"),
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
    options = ["--as-published", "--eval-target-proposals", 0]
    base, first, model, psi = run_and_load([*POOLED, *options], tmp_path / "run")
    assert type(model) is type(base) and type(psi) is type(first) is TwistMLP
    config = saved_config(tmp_path / "run")
    assert (config.resampling, config.ess_threshold, config.moves) == ("multinomial", 1.0, 0)
    assert config.student == "full" and not (config.pooling or config.learn_value)
    said = capsys.readouterr().out
    assert "Generation 1" in said and "Target" not in said and "KL" not in said
    for flags in (["--ess-threshold", "0.5"], ["--student", "lora"], ["--pooling"]):
        with pytest.raises(InputError, match=f"--as-published sets {flags[0]} itself"):
            read_config(["--as-published", *flags], "")


def test_an_option_goes_before_its_preset():
    assert read_config(["--preset", "paper"], "")[0].particles == 100
    assert read_config(["--preset", "paper", "--particles", "7"], "")[0].particles == 7


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--beta", -1], ["--beta", "at least 0"]),
        (["--beta", "many"], ["--beta", "many"]),
        (["--particels", 5], ["--particels", "--help"]),
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


@pytest.mark.parametrize("how", ["truncated", "tampered", "missing"])
@pytest.mark.parametrize("role", ["lm", "toxicity", "similarity"])
def test_damaged_weights_are_refused(tmp_path, role, how):
    path = shutil.copytree(POCKET / role, tmp_path / role) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4000] + b"\xff" * 4000 if how == "tampered" else data[:-4000])
    if how == "missing":
        path.unlink()
    flag = "--lm" if role == "lm" else f"--{role}-model"
    assert f"{path}: " in refusal("--out", tmp_path / "run", flag, path.parent)
