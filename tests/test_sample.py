"""`python -m eval.sample` and `TrainedRun` give what was sampled; bad input is one line."""

import dataclasses
import re
import shutil

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


@pytest.mark.parametrize("prompt", [f"{PROMPT} girl V", PROMPT])
def test_a_prompt_that_ends_inside_a_word_is_one_line(prompt, capsys):
    load_sigma(RunOptions(prompt=prompt, device="cpu"))
    assert ("--prompt ends inside a word" in capsys.readouterr().err) == prompt.endswith("V")


@pytest.mark.parametrize(
    ("learner", "m", "prompt"), [("paper", 0, PROMPT), ("paper", 1, OTHER), ("pooled", 1, OTHER)]
)
def test_without_resampling_the_weights_are_p_phi_over_q(
    tmp_path, finished_job, learner, m, prompt
):
    """Of a pair with noise in all its tensors, so that weights differ."""
    run = shutil.copytree(finished_job(learner), tmp_path / "run")
    trained = TrainedRun(run, m)
    tensors, told = load_file(trained.pair), read_metadata(trained.pair)
    for seed, name in enumerate(sorted(tensors)):
        tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=generator(seed))
    save_file(tensors, trained.pair, told)
    options = dataclasses.replace(trained.config.run, prompt=prompt)
    world = load_sigma(options)
    pair = load_pair(trained.pair, world.base)
    drawn = trained.sample(9, 4, prompt=prompt, ess_threshold=0.0)
    tokens = drawn.population.tokens.flatten(0, 1)  # [R K, T]
    log_phi = options.beta * world.log_toxicity(drawn.texts).double()
    log_q = proposal_log_probs(pair.model, pair.twist, tokens)[1]
    log_w = sequence_log_probs(world.base, tokens) + log_phi - log_q  # [R K]
    close = {"rtol": 0, "atol": 1e-3}
    log_z = log_mean_exp(log_w.view(4, 9))
    torch.testing.assert_close(drawn.population.log_z.double(), log_z, **close)
    torch.testing.assert_close(drawn.log_weights.exp(), normalise(log_w.double()), **close)


def test_the_command_prints_what_programs_draw(finished_job, capsys):
    run, few = finished_job("paper"), ["--particles", "6", "--runs", "3"]
    soft = TrainedRun(run).sample(6, 3, potential=("keyword~2:was",))
    had = [re.search(r"\bwas\b", text.removeprefix(PROMPT)) for text in soft.texts]
    assert soft.scores["log_phi"].tolist() == [0.0 if has else -2.0 for has in had]
    rule = {"resample": SCHEMES["systematic"], "ess_threshold": 0.0}
    other = TrainedRun(run, generation=0).sample(6, 3, prompt=OTHER, length=3, seed=1, **rule)
    changes = ["--generation", "0", "--prompt", OTHER, "--length", "3", "--seed", "1"]
    changes += ["--resampling", "systematic", "--threshold", "0"]
    for options, drawn, head in (
        (changes, other, "0, 3 runs of K = 6, T = 3, seed 1"),
        (["--potential", "keyword~2:was"], soft, "1, 3 runs of K = 6, T = 5"),
    ):
        sample.main([str(run), *few, *options])
        printed = capsys.readouterr().out
        assert f"\ngeneration {head}" in printed
        assert printed.endswith(f"\n{report(drawn, True, 10)}\n")


def test_bad_input_is_one_line(tmp_path, finished_job):
    run = finished_job("paper")
    (tmp_path / "file").write_text("")
    few = ("--particles", 2, "--runs", 1, "--length", 3)
    for arguments, words in (
        ([], "no run is named: python -m eval.sample "),
        ([tmp_path / "none"], f"{tmp_path / 'none'}/config.json: no such file; name a run"),
        ([run, "--generation", 7], f"generation 7 is not in {run}; it holds 0 to 1"),
        ([run, "--lm", "x"], "--lm is for sampling without RUN"),
        ([run, "--picture", tmp_path / "file" / "a.png", *few], "a.png: cannot be written"),
        (["--potential", "keyword:dog", "--picture", "a.png"], "forced draws have no genealogy"),
        (["--potential", "without:a", "--generation", 1], "--generation is one of RUN"),
    ):
        line = refusal(*arguments, command=sample.main)
        assert re.search(words, line), (arguments, line)


def test_sampling_without_training(capsys, tmp_path):
    sizes = ["--particles", "20", "--runs", "4", "--length", "8", "--samples", "3"]
    sizes += ["--potential", "without:a", "--picture", str(tmp_path / "picture.png")]
    sample.main(["--potential", "ended", "--end", ".", "--prompt", "One day, a", *sizes])
    prompt, head, _, *rate, title, first, second, third = capsys.readouterr().out.splitlines()
    assert prompt == "One day, a" and head == "p proposes, 4 runs of K = 20, T = 8, seed 0"
    assert rate[-1].startswith("About 1 in ") and title == " share  log phi  text"
    for line in (first, second, third):
        numbers, _, text = line.partition("One day, a")
        assert numbers.split()[1] == "0.00" and not re.search(r"\.|\ba\b", text)
    assert (tmp_path / "picture.png").stat().st_size > 9000


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
    for error in (0.3, float("inf")):
        assert "do not agree within a factor of ten" in rate(Estimate(-5.0, error, 1.0))
