"""`python -m tsmc` and `load_run` give what was sampled; bad input is one line."""

import copy
import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from worlds import generator

import tinystories
from eval import load_run
from eval.run.options import POCKET, RunConfig
from eval.run.setup import load_setup, toxicity
from eval.run.trained import load_generation, save_generation
from eval.viewer import __main__ as viewer
from tinystories.checkpoint import write_json, write_tensors
from tinystories.errors import InputError
from tsmc import proposal_log_probs
from tsmc.proposal import sequence_log_probs
from tsmc.resampling import effective_sample_size, log_mean_exp, normalise
from twist.adapter import Adapter
from twist.mlp import TwistMLP
from twist.value import ValueTwist

PROMPT = "Once upon a time, there was a"
OTHER = "The ugly dog said"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Generation 0: p^(0) and psi^(0) with an adapter; 1: an adapter; 2: fine-tuned, and an MLP.

    All weights are random, and every model differs.
    """
    path = tmp_path_factory.mktemp("runs") / "small"
    write_json(path / "config.json", dataclasses.asdict(RunConfig(length=5)))
    model, tokenizer = tinystories.load(POCKET / "lm")
    sizes, source = model.config, generator(0)
    memory = 0.1 * torch.randn(sizes.vocab_size, generator=source)
    first, second = (Adapter(model, memory, True, 16, source) for _ in range(2))
    widths = (sizes.hidden_size, 16, sizes.vocab_size, source)
    twists = [ValueTwist(*widths, memory, first), ValueTwist(*widths, memory), TwistMLP(*widths)]
    tuned = copy.deepcopy(model)
    tuned.wte.weight.data *= 0.9
    for module in (first.shift, second.shift, twists[0].network, *twists[1:]):
        for value in module.parameters():
            value.data += 0.1 * torch.randn(value.shape, generator=source)
    for m, p in enumerate((model, second, tuned)):
        save_generation(path / f"generation-{m}", p, tokenizer, twists[m])
    return path


@pytest.fixture
def printed(run, capsys):
    """What the program prints for this run, given arguments."""

    def call(*arguments: object) -> str:
        viewer.main([str(run), *map(str, arguments)])
        return capsys.readouterr().out

    return call


def test_json_accounts_for_every_particle(printed):
    options = ("--particles", 12, "--runs", 2, "--samples", 5, "--generation", 0)
    record = json.loads(printed("--json", *options))
    weights = [row["weight"] for row in record["distinct"]]
    assert sum(weights) == pytest.approx(1) and weights == sorted(weights, reverse=True)
    assert sum(row["particles"] for row in record["distinct"]) == 24
    texts = [row["text"] for row in record["distinct"]]
    assert len(record["samples"]) == 5 and set(record["samples"]) <= set(texts)
    assert all(text.startswith(PROMPT) and text != PROMPT for text in texts)
    for row in record["distinct"]:
        assert row["log_phi"] == pytest.approx(10 * math.log(row["score"]), abs=1e-3)
    assert 1 <= record["ess"] <= 12
    log_z = torch.tensor(record["log_z_hat_of_runs"], dtype=torch.float64)
    assert record["log_z_hat"] == pytest.approx(log_mean_exp(log_z).item(), abs=1e-6)
    assert (record["generation"], record["length"], record["seed"]) == (0, 5, 0)


@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, OTHER])
def test_without_resampling_the_weights_are_those_of_the_target(run, m, prompt):
    trained = load_run(run, m)
    config = trained.options(prompt=prompt, particles=9, ess_threshold=0.0, rows=18)
    setup = load_setup(config)
    sigma, twist = load_generation(setup, run / f"generation-{m}", m, torch.device("cpu"))
    drawn = trained.draw(config, setup, runs=4)  # two chunks of two runs
    population = drawn.population
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    log_phi = config.beta * setup.log_toxicity(drawn.texts)
    log_q = proposal_log_probs(sigma.model, twist, tokens)[1]
    log_w = sequence_log_probs(setup.base, tokens) + log_phi - log_q  # [R K]
    assert all(text.startswith(prompt) for text in drawn.texts)
    by_run = log_w.view(4, 9)
    torch.testing.assert_close(population.log_z, log_mean_exp(by_run), atol=1e-3, rtol=0)
    torch.testing.assert_close(population.ess, effective_sample_size(by_run), atol=0, rtol=1e-3)
    shares = normalise(log_w.double())
    torch.testing.assert_close(drawn.log_weights.exp(), shares, atol=1e-3, rtol=0)
    wanted = dict.fromkeys(drawn.texts, 0.0)
    for text, weight in zip(drawn.texts, shares.tolist(), strict=True):
        wanted[text] += weight
    found = {row["text"]: row["weight"] for row in drawn.distinct()}
    assert found == pytest.approx(wanted, abs=1e-3)
    samples = drawn.samples(4000, generator(0))
    shares = {text: samples.count(text) / 4000 for text in wanted}
    assert shares == pytest.approx(wanted, abs=0.036)  # 4.5 standard errors


def test_the_command_line_and_programs_draw_the_same(run, printed):
    options = ("--json", "--particles", 6, "--runs", 3)
    own = printed(*options)
    assert own == printed(*options, PROMPT) == printed(*options, "--generation", 2)
    drawn = load_run(run).sample(particles=6, runs=3)
    record = json.loads(own)
    assert drawn.distinct()[0] == pytest.approx(record["distinct"][0])
    assert drawn.log_z_hat == pytest.approx(record["log_z_hat"])
    other = load_run(run, generation=0).sample(OTHER, particles=6, runs=3, length=3, seed=1)
    changed = json.loads(printed(OTHER, *options, "--length", 3, "--seed", 1, "--generation", 0))
    assert [row["text"] for row in other.distinct()] == [row["text"] for row in changed["distinct"]]
    assert json.loads(printed(*options, "--seed", 1))["distinct"] != record["distinct"]


def test_another_potential_weighs_the_same_proposals(printed):
    """Without resampling before the last token the same texts come out."""
    options = ("--json", "--particles", 30, "--ess-threshold", 0)
    own = json.loads(printed(*options))["distinct"]
    other = json.loads(printed(*options, "--potential", "keyword~2:a"))["distinct"]
    assert {row["text"] for row in own} == {row["text"] for row in other}
    assert {round(row["log_phi"], 5) for row in other} == {0.0, -2.0}


def test_several_generations_are_what_each_is_alone(printed, tmp_path):
    page = tmp_path / "page.html"
    options = ("--json", "--particles", 6, "--generation")
    lines = printed(*options, 1, 0, 1, "--html", page).splitlines()
    assert lines == [printed(*options, m).rstrip("\n") for m in (1, 0)]
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    populations = json.loads(found.group(1))["populations"]
    assert [one["generation"] for one in populations] == [1, 0]
    log_z_hat = [json.loads(line)["log_z_hat_of_runs"][0] for line in lines]
    assert [one["log_z_hat"][-1] for one in populations] == pytest.approx(log_z_hat, abs=1e-3)


def test_the_table_shows_each_drawn_text_once(printed):
    options = ("--particles", 8, "--samples", 8)
    lines = printed(*options).strip().splitlines()
    record = json.loads(printed(*options, "--json"))
    shown = [row for row in record["distinct"] if row["text"] in record["samples"]]
    for line, row in zip(lines[4:], shown, strict=True):
        count, weight, _, _, text = line.split(maxsplit=4)
        assert text == row["text"] and int(count) == record["samples"].count(text)
        assert float(weight) == pytest.approx(row["weight"], abs=1e-3)


def test_weights_of_zero_are_said_in_words(run, printed, monkeypatch):
    zero = lambda scorer, texts: torch.full((len(texts),), -torch.inf)  # noqa: E731
    monkeypatch.setattr(toxicity.ToxicityScorer, "__call__", zero)
    assert "All weights are zero" in printed("--particles", 4)
    record = json.loads(printed("--json", "--particles", 4), parse_constant=pytest.fail)
    assert record["log_z_hat"] is None and record["samples"] == [] and record["ess"] == 0
    with pytest.raises(InputError, match="weight zero"):
        load_run(run).sample(particles=4)


def expect_refusal(capsys, arguments: list, *parts: str) -> None:
    """Exit code 2 and one line on standard error, after that of loading, that holds every part."""
    with pytest.raises(SystemExit) as ended:
        viewer.main([str(argument) for argument in arguments])
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.startswith("loading the networks of ")]
    assert ended.value.code == 2
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--generation", 0, 7, 1], ["generation 7 is not in", "; it holds 0, 1, 2"]),
        (["--runs", 0], ["size 0", "at least one"]),
        (["word " * 200], ["shorten"]),
        (["--potential", "luck"], ["--potential luck", "keyword:WORD"]),
        (["--html", "/dev/null/page.html"], ["/dev/null/page.html", "cannot be written"]),
    ],
)
def test_bad_options_are_refused(capsys, run, arguments, parts):
    expect_refusal(capsys, [run, *arguments], *parts)


def test_a_directory_with_damaged_or_other_files_is_refused(capsys, tmp_path, run):
    other = shutil.copytree(run, tmp_path / "other")
    tensors = TwistMLP(7, 16, 4096, generator(0)).state_dict()
    write_tensors(other / "generation-2" / "twist.safetensors", tensors)
    expect_refusal(capsys, [other], "generation-2/twist.safetensors", "first.weight has shape")
    options = [other, "--generation", 1]
    adapter = other / "generation-1" / "adapter.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-9])
    expect_refusal(capsys, options, "generation-1/adapter.safetensors: its tensors cannot be read")
    adapter.unlink()
    expect_refusal(capsys, options, "generation-1/config.json: no such file")
