"""Sampled texts: estimates and intervals, weights, `python -m eval.sample`, bad input."""

import dataclasses
import json
import math
import re
import shutil

import pytest
import torch
from distill.tail import pareto_k
from jobs import refusal
from safetensors.torch import load_file, save_file
from tinystories.files import read_metadata
from twist.factors import regex
from worlds import generator, letters, table_world, tiny_conditional

from distill import Pair, load_pair, sample
from eval.options import Options
from eval.sample import TrainedJob, rate, report
from eval.sample import main as command
from eval.world import load_plain_world
from tsmc import SCHEMES, Rule, Streams, proposal_log_probs, tsmc
from tsmc.draws import log_mean_exp, normalise
from tsmc.estimate import Estimate
from tsmc.exact import Target
from tsmc.proposal import sequence_log_probs
from tsmc.sigma import seen_from
from twist import TextPotential


def spelled(texts):
    return [-float(text.count("c")) for text in texts]


spelled.reads, spelled.prefix = "continuations", spelled
MODEL = tiny_conditional(1)
PHI = TextPotential([spelled], letters, MODEL.prompt)


@pytest.mark.learned
def test_samples_and_probabilities_agree_with_enumeration():
    count = {"count": lambda texts: [text.count("c") for text in texts]}
    drawn = sample(MODEL, PHI, particles=20, runs=100, seed=3, scores=count)
    target = Target(MODEL, lambda tokens, log_p: PHI(tokens))
    evidence = drawn.evidence()
    assert abs(evidence.value - target.log_z) < 5 * evidence.std_error < 0.1
    share = drawn.probability(lambda text: text.endswith("d"))
    exact = target.log_sigma[-1].view(-1, 7)[:, 3].exp().sum().item()
    assert abs(share.value - exact) < 2.5 * share.half_width() < 0.2
    expected = drawn.probability(lambda text: 0.3 * text.endswith("d"))
    assert expected.value == pytest.approx(0.3 * share.value)
    rows = drawn.samples(4000)
    assert abs(sum(row["text"].endswith("d") for row in rows) / 4000 - share.value) < 0.04
    assert all(row["count"] == row["text"].count("c") for row in rows)
    for wrong in (1.1, math.nan, "yes", None):
        with pytest.raises(ValueError, match="not true, false or a number from 0 to 1"):
            drawn.probability(lambda text, wrong=wrong: wrong)


@pytest.mark.learned
@pytest.mark.parametrize(("particles", "runs"), [(20, 5), (3, 2), (9, 1)])
def test_a_probability_and_its_interval_are_between_0_and_1(particles, runs):
    """And it is never certain, also of what holds for texts without weight alone."""
    hard = TextPotential([regex("c")], letters, MODEL.prompt)
    drawn = sample(MODEL, hard, None, particles, runs)
    for value in (0, 1):
        share = drawn.probability(lambda text, value=value: ("c" in text) == value)
        assert share.value == pytest.approx(value) and 0 <= share.value <= 1
        low, high = share.quantile(0.025), share.quantile(0.975)
        assert 0 <= low <= share.value <= high <= 1 and high - low >= min(1, 1 / drawn.ess)


def test_what_cannot_be_drawn_is_one_line_and_equal_seeds_give_equal_texts():
    calls = []

    def drifting(texts):
        """Other numbers from the twelfth call on: that of the texts that have been drawn."""
        calls.append(texts)
        return [-2.0 * (len(calls) > 11)] * len(texts)

    with pytest.raises(ValueError, match="it must depend on its text alone"):
        sample(MODEL, TextPotential([drifting], letters, [1, 2]))
    assert len(calls) == 12
    with pytest.raises(ValueError, match="all 8 runs of 50 particles ended with weight zero"):
        sample(MODEL, TextPotential([regex("z")], letters, [1, 2]))
    drawn = [sample(MODEL, PHI, particles=3, runs=4, seed=seed) for seed in (5, 5, 6)]
    assert drawn[0].texts == drawn[1].texts != drawn[2].texts
    with pytest.raises(ValueError, match="0 samples cannot be drawn"):
        drawn[0].samples(0)


@pytest.mark.learned
@pytest.mark.parametrize(("scale", "ess_threshold"), [(0.5, 1.0), (3.0, 0.0)])
def test_intervals_cover_where_weights_are_light_and_a_heavy_tail_is_told(scale, ess_threshold):
    """Nominal 95 % intervals of log Z and of a probability, in a world of 729 texts.

    Light runs resample at every step and share first tokens, which their ESS does not know.
    """
    model, twist, potential = table_world(3, 6, scale=scale)  # a twist that knows nothing
    target, pair, count = Target(model, potential), Pair(model, twist), 40
    places = target.tree.sequences().tolist()
    log_phi = dict(zip(letters(places), potential.log_phi.tolist(), strict=True))
    phi = TextPotential([lambda texts: [log_phi[one[1:]] for one in texts]], letters, model.prompt)
    rule = Rule(SCHEMES["systematic"], ess_threshold)
    parts = [sample(model, phi, pair, 20, seed=seed, rule=rule) for seed in range(count)]
    evidence = [part.evidence() for part in parts]
    share = target.log_sigma[1][1].exp().item()
    found = [part.probability(lambda text: text[1] == "b") for part in parts]
    covered = sum(abs(x.value - target.log_z) < x.half_width() for x in evidence) / count
    covered_share = sum(abs(x.value - share) < x.half_width() for x in found) / count
    told = sum("Pareto k" in part.warning() for part in parts) / count
    if scale == 0.5:
        assert min(covered, covered_share) >= 0.75 and told < 0.1
    else:
        assert covered < 0.7 < told


@pytest.mark.learned
def test_the_shape_of_a_pareto_distribution_is_found_where_there_is_one():
    """Also where each text has been drawn three times; not where most weights are equal or zero."""
    uniform = torch.rand(20, 4000, generator=generator(0), dtype=torch.float64)
    for k, copies in ((-0.5, 1), (0.3, 3), (0.7, 1), (1.5, 3)):
        log_weights = ((uniform**-k - 1) / k).log().repeat(1, copies)
        found = torch.tensor([pareto_k(row) for row in log_weights])
        assert found.mean().item() == pytest.approx(k, abs=0.15)
    few, equal = torch.full((2, 400), -math.inf)
    equal[:100], few[:4] = 0.0, 0.0
    repeated = torch.randn(9, generator=generator(0)).repeat(100)
    assert all(math.isnan(pareto_k(one)) for one in (equal, repeated, torch.zeros(20)))
    assert pareto_k(few) == math.inf
    alike = TextPotential([lambda texts: [0.0] * len(texts)], letters, MODEL.prompt)
    drawn = sample(MODEL, alike)
    assert math.isnan(drawn.pareto_k) and drawn.warning() == ""


PROMPT = "Once upon a time, there was a"
OTHER = "The ugly dog said"
RUNS = [("paper", 1, OTHER), ("pooled", 1, PROMPT)]


@pytest.mark.parametrize("prompt", [f"{PROMPT} girl V", PROMPT])
def test_a_prompt_that_ends_inside_a_word_is_one_line(prompt, capsys):
    load_plain_world(Options(prompt=prompt, device="cpu"))
    is_told = "p mostly goes on with the last word" in capsys.readouterr().err
    assert is_told == prompt.endswith("V")


@pytest.mark.parametrize(("learner", "m", "prompt"), RUNS)
def test_without_resampling_weights_are_p_phi_over_q(tmp_path, finished_job, learner, m, prompt):
    """Of a pair with noise in all its tensors, so that weights differ."""
    run = shutil.copytree(finished_job(learner), tmp_path / "run")
    trained = TrainedJob(run, m)
    tensors, told = load_file(trained.pair), read_metadata(trained.pair)
    for seed, name in enumerate(sorted(tensors)):
        tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=generator(seed))
    save_file(tensors, trained.pair, told)
    options = dataclasses.replace(trained.options, prompt=prompt)
    world = load_plain_world(options)
    pair = load_pair(trained.pair, world.base)
    drawn = trained.sample(9, 4, Rule(SCHEMES["multinomial"], 0.0), prompt=prompt)
    tokens = drawn.population.tokens.flatten(0, 1)  # [R K, T]
    log_phi = options.beta * world.scores["toxicity"](drawn.texts).log()
    log_q = proposal_log_probs(pair.model, pair.twist, tokens)[1]
    log_w = sequence_log_probs(world.base, tokens) + log_phi - log_q  # [R K]
    close = {"rtol": 0, "atol": 1e-3}
    log_z = log_mean_exp(log_w.view(4, 9))
    torch.testing.assert_close(drawn.population.log_z.double(), log_z, **close)
    torch.testing.assert_close(drawn.log_weights.exp(), normalise(log_w.double()), **close)


def test_the_command_prints_what_programs_draw(finished_job, capsys):
    run, few = finished_job("paper"), ["--particles", "6", "--runs", "3"]
    soft = TrainedJob(run).sample(6, 3, potential=("keyword~2:was",))
    had = [re.search(r"\bwas\b", text.removeprefix(PROMPT)) for text in soft.texts]
    assert soft.scores["log_phi"].tolist() == [0.0 if has else -2.0 for has in had]
    rule = Rule(SCHEMES["systematic"], 0.0)
    other = TrainedJob(run, generation=0).sample(6, 3, rule, prompt=OTHER, length=3, seed=1)
    changes = ["--generation", "0", "--prompt", OTHER, "--length", "3", "--seed", "1"]
    changes += ["--resampling", "systematic", "--ess-threshold", "0"]
    for options, drawn, head in (
        (changes, other, "0, 3 runs of K = 6, T = 3, seed 1"),
        (["--potential", "keyword~2:was"], soft, "1, 3 runs of K = 6, T = 5"),
    ):
        command([str(run), *few, *options])
        printed = capsys.readouterr().out
        assert f"\ngeneration {head}" in printed
        assert printed.endswith(f"\n{report(drawn, True, 10)}\n")


def test_bad_input_is_one_line(tmp_path, finished_job):
    run = finished_job("paper")
    for arguments, words in (
        ([], "no job is named: python -m eval.sample "),
        ([tmp_path / "none", "--samples", 0], "--samples is 0; give a number at least 1"),
        ([tmp_path / "none"], f"{tmp_path / 'none'}/config.json: no such file; name a job"),
        ([run, "--generation", -1], "--generation is -1; give a number at least 0"),
        ([run, "--generation", 7], f"generation 7 is not in {run}; it holds 0 to 1"),
        (["--potential", "keyword:dog", "--ess-threshold", 1], "forced draws resample at the end"),
        (["--potential", "keyword:dog", "--picture", "p.html"], "forced draws have not; name JOB"),
        (["--potential", "ended_stories.py:log_phi"], "there is no file .*ended_stories.py"),
        ([run, "--picture", tmp_path], "--picture .*: give a file in a folder that is there"),
        ([run, "--partcles=20"], "unrecognized arguments: .*; did you mean --particles[?] --help"),
    ):
        line = refusal(*arguments, command=command)
        assert re.search(words, line), (arguments, line)


def test_sampling_without_training(capsys):
    sizes = ["--particles", "20", "--runs", "4", "--length", "8", "--samples", "3"]
    sizes += ["--potential", "without:a"]
    command(["--potential", "ended", "--end", ".", "--prompt", "One day, a", *sizes])
    prompt, head, _, *rate, title, first, second, third = capsys.readouterr().out.splitlines()
    assert prompt == "One day, a" and head == "p proposes, 4 runs of K = 20, T = 8, seed 0"
    assert rate[-1].startswith("About 1 in ") and title == " share  log phi  text"
    for line in (first, second, third):
        numbers, _, text = line.partition("One day, a")
        assert numbers.split()[1] == "0.00" and not re.search(r"\.|\ba\b", text)
    command(["--potential", "keyword:submarine", "--runs", "12"])  # which p never writes
    _, head, numbers, *lines = capsys.readouterr().out.splitlines()
    assert head == "forced draws propose, 12 runs of K = 50, T = 20, seed 0"
    assert -36 < float(re.match(r"log Z (-\S+) \+- ", numbers)[1]) < -32
    assert all("submarine" in line for line in lines[-10:])


def test_where_the_weights_are_too_uneven_no_rate_is_told():
    """Of three texts that satisfy a hard potential, one weighs nearly all."""
    hard = TextPotential([regex("c")], letters, MODEL.prompt)
    drawn = sample(MODEL, hard, None, 50, 4)
    assert "About 1 in" in report(drawn, False, 1) and drawn.warning() == ""
    uneven = torch.linspace(0, 100, 200, dtype=torch.float64).log_softmax(0)
    drawn = dataclasses.replace(drawn, log_weights=uneven)
    assert "Pareto k" in drawn.warning() and "About 1 in" not in report(drawn, False, 1)


def test_a_picture_has_the_particles_of_a_run_and_their_ancestors(finished_job, tmp_path, capsys):
    """Its pieces spell the texts of the samples, along the lines of their ancestors."""
    page = tmp_path / "page.html"
    sizes = ["--particles", "6", "--runs", "2", "--length", "7"]
    command([str(finished_job("paper")), *sizes, "--picture", str(page)])
    assert str(page) in capsys.readouterr().err
    html = page.read_text(encoding="utf-8")
    assert "http" not in html  # it needs no network
    data = json.loads(html.split("const data = ")[1].split(", steps = ")[0])
    trained = TrainedJob(finished_job("paper"))
    world = load_plain_world(dataclasses.replace(trained.options, length=7))
    pair, trace = load_pair(trained.pair, world.base), []
    stream = Streams(trained.options.seed).stream("picture")
    sigma = seen_from(pair.model, world.base, world.potential)
    population = tsmc(sigma, pair.twist, 6, stream, 1, trained.rule(), trace)
    steps, samples = data["steps"], population.samples[0]
    assert len(steps) == len(data["samples"]) == 7
    for k, text in enumerate(world.potential.texts(samples)):
        line = [row[k] for row in data["samples"]]
        pieces = [step["pieces"][place] for step, place in zip(steps, line, strict=True)]
        assert data["prompt"] + "".join(pieces) == text
    for t, (shown, step) in enumerate(zip(steps, trace, strict=True)):
        assert len(shown["lines"]) == t + 1 and shown["lines"][t] == [*range(6)]
        assert t == 0 or shown["lines"][t - 1] == trace[t - 1].ancestors[0].tolist()
        assert shown["weights"] == pytest.approx(normalise(step.log_weights[0]).tolist())
        assert [step.ancestors[0].tolist().count(k) for k in range(6)] == shown["children"]


def test_a_rate_has_an_interval_that_says_something_or_none():
    assert re.search(r"1 in 148 .* \(95 %: 73 to 302\)", rate(Estimate(-5.0, 0.3, 7.0)))
    assert re.search(r"1 in 1.11 .* \(95 %: 1 to 2.25\)", rate(Estimate(-0.1, 0.3, 7.0)))
    for error in (0.3, float("inf")):
        assert "do not agree within a factor of ten" in rate(Estimate(-5.0, error, 1.0))
