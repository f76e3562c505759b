"""`python -m tsmc` and `load_run` give what was sampled; bad input is one line."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from jobs import refusal
from networks import randomise
from safetensors.torch import load_file, save_file
from worlds import generator

import tinystories
from eval import load_run, sample
from eval.config import POCKET
from eval.sample import draw
from tinystories import Conditional
from tinystories.checkpoint import read_json, read_metadata, write_json
from tsmc import proposal_log_probs
from tsmc.proposal import sequence_log_probs
from tsmc.resampling import log_mean_exp, normalise
from twist.adapter import Adapted, Adapter
from twist.pair import Pair, save_pair

PROMPT = "Once upon a time, there was a"
OTHER = "The ugly dog said"


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory) -> Path:
    """A finished run with noise in its twists, and a generation 2 that is an adapter."""
    path = shutil.copytree(finished_run, tmp_path_factory.mktemp("runs") / "small")
    source = generator(0)
    for file in sorted(path.glob("generation-*/twist.safetensors")):
        tensors = load_file(file)
        for name in sorted(tensors):
            tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=source)
        save_file(tensors, file, read_metadata(file))
    base = Conditional(tinystories.load(POCKET / "lm")[0], torch.tensor([1]), 1)
    scores = torch.randn(base.vocab_size, generator=source)
    adapter = Adapter(base.output_embeddings, scores, source)
    randomise(adapter.shift.last, 1).weight.data *= 0.1
    (path / "generation-2").mkdir()
    shutil.copy(path / "generation-1" / "row.json", path / "generation-2")
    save_pair(path / "generation-2", Pair(Adapted(base, adapter), None), base)
    return path


@pytest.fixture
def printed(run, capsys):
    """What the program prints for this run, given arguments."""

    def call(*arguments: object) -> str:
        sample.main([str(run), *map(str, arguments)])
        return capsys.readouterr().out

    return call


def test_json_and_table_account_for_every_particle(printed):
    options = ("--particles", 12, "--runs", 2, "--samples", 8, "--generation", 0)
    record = json.loads(printed("--json", *options))
    rows, samples = record["weighted"], record["samples"]
    assert sum(row["weight"] for row in rows) == pytest.approx(1)
    assert len(rows) == 24 and len(samples) == 8 and all(sample in rows for sample in samples)
    for row in rows:
        assert row["log_phi"] == pytest.approx(10 * math.log(row["toxicity"]), abs=1e-3)
    assert (record["generation"], record["length"], record["seed"]) == (0, 20, 0)
    table = printed(*options).strip().partition(" share  log phi  toxicity  text\n")[2]
    for line, row in zip(table.splitlines(), samples, strict=True):
        *numbers, text = line.split(maxsplit=3)
        wanted = [row[name] for name in ("weight", "log_phi", "toxicity")]
        assert [float(number) for number in numbers] == pytest.approx(wanted, abs=5e-3)
        assert text == row["text"]


@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, OTHER])
def test_without_resampling_the_weights_are_those_of_the_target(run, m, prompt):
    trained = load_run(run, m)
    options = dataclasses.replace(trained.config.run, prompt=prompt, beta=0.3)
    world = trained.world(options)
    pair = trained.pair(world)
    drawn = draw(world, pair, options, 9, 4, **trained.rule(world))
    tokens = drawn.population.tokens.flatten(0, 1)  # [R K, T]
    log_phi = options.beta * world.log_toxicity(drawn.texts).double()
    log_q = proposal_log_probs(pair.model, pair.twist, tokens)[1]
    log_p = sequence_log_probs(world.base, tokens)
    log_w = log_p + log_phi - log_q  # [R K]
    log_z = log_mean_exp(log_w.view(4, 9))
    torch.testing.assert_close(drawn.population.log_z, log_z, atol=1e-3, rtol=0)
    shares = normalise(log_w.double())
    torch.testing.assert_close(drawn.log_weights.exp(), shares, atol=1e-3, rtol=0)
    wanted = dict.fromkeys(drawn.texts, 0.0)
    for text, weight in zip(drawn.texts, shares.tolist(), strict=True):
        wanted[text] += weight
    samples = drawn.samples(4000, generator(0))
    texts = [sample["text"] for sample in samples]
    shares = {text: texts.count(text) / 4000 for text in wanted}
    assert shares == pytest.approx(wanted, abs=0.036)  # 4.5 standard errors
    log_p = dict(zip(drawn.texts, log_p.tolist(), strict=True))
    assert all(row["log_p"] == pytest.approx(log_p[row["text"]]) for row in samples)


def test_the_command_line_and_programs_draw_the_same(run, printed):
    record = json.loads(printed("--json", "--runs", 2))
    assert record == json.loads(printed("--json", "--prompt", PROMPT, "--runs", 2))
    trained = load_run(run)
    for given in ({}, {"prompt": PROMPT, "particles": 50, "seed": 0}):
        drawn = trained.sample(runs=2, **given)
        assert drawn.samples(10) == record["samples"]
        assert drawn.population.log_z.tolist() == record["log_z_hat"]
        assert [drawn.row(k) for k in range(100)] == record["weighted"]
    assert record["log_z"] == pytest.approx(drawn.population.log_mean_z())
    other = load_run(run, generation=0).sample(6, 3, prompt=OTHER, length=3, seed=1)
    options = ("--json", "--particles", 6, "--runs", 3)
    changed = printed("--prompt", OTHER, *options, "--length", 3, "--seed", 1, "--generation", 0)
    assert other.samples(10) == json.loads(changed)["samples"]
    assert trained.sample(particles=6, runs=3, length=3).texts != other.texts
    record = json.loads(printed("--json", "--potential", "keyword~2:was", *options[1:]))
    texts = [row["text"][len(PROMPT) :] for row in record["weighted"]]
    had = [re.search(r"\bwas\b", text) for text in texts]
    assert [row["log_phi"] for row in record["weighted"]] == [0.0 if has else -2.0 for has in had]


def test_bad_input_is_one_line(tmp_path, run):
    other = shutil.copytree(run, tmp_path / "other")
    config = read_json(other / "config.json")
    write_json(other / "config.json", config | {"networks": config["networks"] | {"lm": "0"}})
    (tmp_path / "file").write_text("")
    few = ("--particles", 2, "--runs", 1, "--length", 3)
    for arguments, words in (
        ([], "no run is named: python -m tsmc "),
        ([tmp_path / "none"], f"{tmp_path / 'none'}: no such directory"),
        ([tmp_path], f"{tmp_path}: holds no saved generation"),
        ([other], f"{other}: lm changed since the run was made; restore"),
        ([run, "--generation", 7], f"generation 7 is not in {run}; it holds 0, 1, 2"),
        ([run, "--runs", 0], "runs is 0; give a whole number"),
        ([run, "--particles", 0], "particles is 0; give a whole number"),
        ([run, "--samples", 0, *few], "0 samples cannot be drawn"),
        ([run, "--prompt", "word " * 200], "shorten"),
        ([run, "--potential", "luck"], "--potential luck"),
        ([run, "--lm", "x"], "--lm is for sampling without RUN"),
        ([run, "--picture", tmp_path / "file" / "a.png", *few], "a.png: cannot be written"),
        (["--potential", "luck"], "--potential luck"),
        (["--potential", "without:a", "--prompt", ""], "the prompt is empty"),
    ):
        assert words in refusal(*arguments, command=sample.main), arguments


def test_sampling_without_training(capsys, tmp_path):
    sizes = ["--particles", "20", "--runs", "4", "--length", "8", "--samples", "3"]
    soft = ["--potential", "keyword~3:dog", "--prompt", "One day, a"]
    sample.main([*soft, "--json", *sizes])
    record = json.loads(capsys.readouterr().out)
    assert (record["prompt"], record["run"], record["length"]) == ("One day, a", None, 8)
    assert {row["log_phi"] for row in record["weighted"]} <= {0.0, -3.0}
    sample.main(["--potential", "without:a", *sizes, "--picture", str(tmp_path / "picture.png")])
    text = capsys.readouterr().out
    assert "p proposes" in text and "1 / sum W^2" in text and "toxicity" not in text
    assert "About 1 in" in text and (tmp_path / "picture.png").stat().st_size > 9000
