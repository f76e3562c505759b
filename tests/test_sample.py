"""`python -m eval.sample` and `TrainedRun` give what was sampled; bad input is one line."""

import dataclasses
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from jobs import refusal
from safetensors.torch import load_file, save_file
from worlds import generator

from eval import sample
from eval.options import RunOptions
from eval.sample import TrainedRun, rate, report
from eval.world import load_sigma
from tinystories.files import read_metadata
from tsmc import SCHEMES, proposal_log_probs
from tsmc.draws import log_mean_exp, normalise
from tsmc.estimate import Estimate
from tsmc.proposal import sequence_log_probs
from twist import load_pair

PROMPT = "Once upon a time, there was a"
OTHER = "The ugly dog said"


@pytest.fixture(scope="module")
def runs(finished_job, tmp_path_factory) -> dict[str, Path]:
    """Finished runs by learner, with noise in their twists and adapters."""
    source, copies = generator(0), {}
    for learner, part in (("paper", "twist."), ("pooled", "model.")):
        place = tmp_path_factory.mktemp("runs") / learner
        copies[learner] = shutil.copytree(finished_job(learner), place)
        for file in sorted(copies[learner].glob("generation-*/pair.safetensors")):
            tensors = load_file(file)
            for name in sorted(name for name in tensors if name.startswith(part)):
                tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=source)
            save_file(tensors, file, read_metadata(file))
    return copies


@pytest.mark.parametrize("prompt", [f"{PROMPT} girl V", PROMPT])
def test_a_prompt_that_ends_inside_a_word_is_one_line(prompt, capsys):
    load_sigma(RunOptions(prompt=prompt, device="cpu"))
    assert ("--prompt ends inside a word" in capsys.readouterr().err) == prompt.endswith("V")


@pytest.mark.parametrize(("learner", "m"), [("paper", 0), ("paper", 1), ("pooled", 1)])
@pytest.mark.parametrize("prompt", [PROMPT, OTHER])
def test_without_resampling_the_weights_are_those_of_the_target(runs, learner, m, prompt):
    trained = TrainedRun(runs[learner], m)
    options = dataclasses.replace(trained.config.run, prompt=prompt)
    world = load_sigma(options)
    pair = load_pair(trained.pair, world.base)
    drawn = trained.sample(9, 4, prompt=prompt, ess_threshold=0.0)
    tokens = drawn.population.tokens.flatten(0, 1)  # [R K, T]
    log_phi = options.beta * world.log_toxicity(drawn.texts).double()
    log_q = proposal_log_probs(pair.model, pair.twist, tokens)[1]
    log_w = sequence_log_probs(world.base, tokens) + log_phi - log_q  # [R K]
    torch.testing.assert_close(
        drawn.population.log_z.double(), log_mean_exp(log_w.view(4, 9)), atol=1e-3, rtol=0
    )
    shares = normalise(log_w.double())
    torch.testing.assert_close(drawn.log_weights.exp(), shares, atol=1e-3, rtol=0)


def test_the_table_has_a_line_for_every_sample(runs):
    drawn = TrainedRun(runs["paper"], 0).sample(particles=12, runs=2)
    samples = drawn.samples(8)
    table = report(drawn, True, 8).partition(" share  log phi  toxicity  text\n")[2]
    for line, row in zip(table.splitlines(), samples, strict=True):
        assert row["log_phi"] == pytest.approx(0.3 * math.log(row["toxicity"]), abs=1e-4)
        *numbers, text = line.split(maxsplit=3)
        wanted = [row[name] for name in ("weight", "log_phi", "toxicity")]
        assert [float(number) for number in numbers] == pytest.approx(wanted, abs=5e-3)
        assert text == row["text"]


def test_the_command_prints_what_programs_draw(runs, capsys):
    run, few = runs["paper"], ["--particles", "6", "--runs", "3"]
    last = TrainedRun(run)
    soft = last.sample(6, 3, potential=("keyword~2:was",))
    had = [re.search(r"\bwas\b", text.removeprefix(PROMPT)) for text in soft.texts]
    assert soft.scores["log_phi"].tolist() == [0.0 if has else -2.0 for has in had]
    rule = {"resample": SCHEMES["systematic"], "ess_threshold": 0.0}
    other = TrainedRun(run, generation=0).sample(6, 3, prompt=OTHER, length=3, seed=1, **rule)
    changes = ["--generation", "0", "--prompt", OTHER, "--length", "3", "--seed", "1"]
    changes += ["--resampling", "systematic", "--threshold", "0"]
    for options, drawn, head in (
        (["--runs", "2"], last.sample(50, 2, prompt=PROMPT), "1, 2 runs of K = 50"),
        ([*few, *changes], other, "0, 3 runs of K = 6, T = 3, seed 1"),
        ([*few, "--potential", "keyword~2:was"], soft, "1, 3 runs of K = 6, T = 5"),
    ):
        sample.main([str(run), *options])
        printed = capsys.readouterr().out
        assert f"\ngeneration {head}" in printed
        assert printed.endswith(f"\n{report(drawn, True, 10)}\n")


def test_bad_input_is_one_line(tmp_path, finished_job):
    run = finished_job("paper")
    other = shutil.copytree(run, tmp_path / "other")
    base = other / "base" / "samples.safetensors"
    tensors = load_file(base)
    save_file(tensors | {"log_p": tensors["log_p"] - 1.0}, base)
    few = ("--particles", 2, "--runs", 1, "--length", 3)
    for arguments, words in (
        ([], "no run is named: python -m eval.sample "),
        ([tmp_path / "none"], f"{tmp_path / 'none'}/config.json: no such file; name a run"),
        ([other], "log_p of one of its texts is .* now, and was .*; restore the networks"),
        ([run, "--generation", 7], f"generation 7 is not in {run}; it holds 0 to 1"),
        ([run, "--samples", 0, *few], "0 samples cannot be drawn"),
        ([run, "--lm", "x"], "--lm is for sampling without RUN"),
        (["--potential", "luck"], "--potential luck"),
        (["--potential", "keyword:dog", "--threshold", 1], "forced draws resample at the end"),
        (["--potential", "without:a", "--generation", 1], "--generation is one of RUN"),
    ):
        line = refusal(*arguments, command=sample.main)
        assert re.search(words, line), (arguments, line)


def test_sampling_without_training(capsys):
    sizes = ["--particles", "20", "--runs", "4", "--length", "8", "--samples", "3"]
    sample.main(["--potential", "without~3:dog", "--prompt", "One day, a", *sizes])
    prompt, head, *_, title, first, second, third = capsys.readouterr().out.splitlines()
    assert prompt == "One day, a" and head == "p proposes, 4 runs of K = 20, T = 8, seed 0"
    assert title == " share  log phi  text"
    assert {float(line.split()[1]) for line in (first, second, third)} <= {0.0, -3.0}
    sample.main(["--potential", "without:a", *sizes])
    assert re.search("1 / sum W.2(.*\n)*About 1 in", capsys.readouterr().out)
    sample.main(["--potential", "ended", "--end", ".", "--end", "!", *sizes])
    *_, first, second, third = capsys.readouterr().out.splitlines()
    assert all(
        line.split()[1] == "0.00" and "." not in line[16:] for line in (first, second, third)
    )


def test_words_that_p_never_writes_need_no_training(capsys):
    sample.main(["--potential", "keyword:submarine", "--runs", "12"])
    _, head, numbers, *lines = capsys.readouterr().out.splitlines()
    assert head == "forced draws propose, 12 runs of K = 50, T = 20, seed 0"
    log_z = float(re.match(r"log Z (-\S+) \+- ", numbers)[1])
    assert -36 < log_z < -32 and any(line.startswith("About 1 in ") for line in lines)
    assert all("submarine" in line for line in lines[-10:])


def test_a_rate_has_an_interval_that_says_something_or_none():
    assert re.search(r"1 in 148 .* \(95 %: 73 to 302\)", rate(Estimate(-5.0, 0.3, 7.0)))
    assert re.search(r"1 in 1.11 .* \(95 %: 1 to 2.25\)", rate(Estimate(-0.1, 0.3, 7.0)))
    for error in (0.3, math.inf):
        assert "do not agree within a factor of ten" in rate(Estimate(-5.0, error, 1.0))
