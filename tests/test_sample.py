"""Weighted samples of a world or of a job: estimates, intervals, `python -m eval.sample`."""

import re
import shutil

import pytest
import torch
from jobs import refusal
from safetensors.torch import load_file, save_file
from worlds import generator, letters, table_world, tiny_conditional

from distill.pair import Pair
from eval.options import Options
from eval.sample import TrainedJob, report, sample
from eval.sample import main as command
from eval.world import World
from tinystories.load import read_json
from tsmc.draws import log_mean_exp
from tsmc.exact import Target
from tsmc.proposal import proposal_log_probs, sequence_log_probs
from twist.potential import TextPotential, factor_of


def spelled(texts):
    return [-float(text.count("c")) for text in texts]


spelled.reads, spelled.prefix = "continuations", spelled
MODEL = tiny_conditional(1)
PLAIN = Pair(MODEL, None)


def world_of(model, *factors) -> World:
    """A world of letters, which has no scores but log phi."""
    return World(model, TextPotential(factors, letters, model.prompt), {}, None)


@pytest.mark.learned
def test_samples_and_probabilities_agree_with_enumeration():
    world = world_of(MODEL, spelled)
    drawn = sample(world, PLAIN, Options(seed=3), particles=20, runs=100)
    target = Target(MODEL, world.potential)
    evidence = drawn.evidence()
    assert abs(evidence.value - target.log_z) < 5 * evidence.std_error < 0.1
    share = drawn.probability(lambda text: text.endswith("d"))
    exact = target.log_sigma[-1].view(-1, 7)[:, 3].exp().sum().item()
    assert abs(share.value - exact) < 2.5 * share.half_width() < 0.2
    expected = drawn.probability(lambda text: 0.3 * text.endswith("d"))
    assert expected.value == pytest.approx(0.3 * share.value)
    rows = drawn.samples(4000)
    assert abs(sum(row["text"].endswith("d") for row in rows) / 4000 - share.value) < 0.04
    assert all(row["log_phi"] == -row["text"][2:].count("c") for row in rows)
    tokens = drawn.population.tokens.flatten(0, 1)
    torch.testing.assert_close(drawn.scores["log_p"], sequence_log_probs(MODEL, tokens))
    others = [sample(world, PLAIN, Options(seed=seed), 3, 4).texts for seed in (5, 5, 6)]
    assert others[0] == others[1] != others[2]


@pytest.mark.learned
@pytest.mark.parametrize(("particles", "runs"), [(20, 5), (3, 2), (9, 1)])
def test_a_probability_is_never_certain(particles, runs):
    """Also of what holds for texts without weight alone."""
    world = world_of(MODEL, factor_of("regex:c"))
    drawn = sample(world, PLAIN, Options(), particles, runs)
    for value in (0, 1):
        share = drawn.probability(lambda text, value=value: ("c" in text[2:]) == value)
        assert share.value == pytest.approx(value, abs=1e-9)
        assert share.half_width() >= min(1, 1 / drawn.ess)


@pytest.mark.learned
@pytest.mark.parametrize("ess_threshold", [1.0, 0.0])
def test_intervals_cover_where_weights_are_light(ess_threshold):
    """Nominal 95 % intervals of log Z and of a probability, in a world of 729 texts, by particles
    that share first tokens, which their ESS does not know, and by independent ones."""
    model, twist, potential = table_world(3, 6, scale=0.5)  # a twist that knows nothing
    target, count = Target(model, potential), 40
    sequences = letters(target.tree.sequences().tolist())
    log_phi = dict(zip(sequences, potential.log_phi.tolist(), strict=True))
    world = world_of(model, lambda texts: [log_phi[one[1:]] for one in texts])
    rule = {"resampling": "systematic", "ess_threshold": ess_threshold}
    pair, seeds = Pair(model, twist), [Options(seed=seed, **rule) for seed in range(count)]
    rows = [sample(world, pair, options, particles=20, runs=8) for options in seeds]
    evidence = [row.evidence() for row in rows]
    shares = [row.probability(lambda text: text[1] == "b") for row in rows]
    share = target.log_sigma[1][1].exp().item()
    assert sum(abs(x.value - target.log_z) < x.half_width() for x in evidence) / count >= 0.75
    assert sum(abs(x.value - share) < x.half_width() for x in shares) / count >= 0.75
    assert {len(row.texts) for row in rows} == {160}
    assert all(row.is_independent == (ess_threshold == 0) for row in rows)


OTHER = "The ugly dog said"


def test_without_resampling_weights_are_p_phi_over_q(tmp_path, finished_job):
    """Of a pair with noise in all its tensors, so that weights differ; after another prompt."""
    job = shutil.copytree(finished_job("paper"), tmp_path / "job")
    path = job / "generation-1" / "pair.safetensors"
    tensors = load_file(path)
    for seed, name in enumerate(sorted(tensors)):
        tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=generator(seed))
    save_file(tensors, path, {"model": ""})
    trained = TrainedJob(job, prompt=OTHER)
    drawn = trained.sample(particles=9, runs=4)
    tokens = drawn.population.tokens.flatten(0, 1)  # [R K, T]
    log_phi = trained.options.beta * drawn.scores["toxicity"].log()
    log_q = proposal_log_probs(trained.pair.model, trained.pair.twist, tokens)[1]
    log_w = drawn.scores["log_p"] + log_phi - log_q  # [R K]
    close = {"rtol": 0, "atol": 1e-3}
    log_z = log_mean_exp(log_w.view(4, 9))
    torch.testing.assert_close(drawn.population.log_z.double(), log_z, **close)
    torch.testing.assert_close(drawn.shares.flatten(), log_w.softmax(0), **close)
    assert drawn.shares.max() > 1.1 / 36 and all(text.startswith(OTHER) for text in drawn.texts)


def test_the_command_prints_what_programs_draw(finished_job, capsys):
    job, few = finished_job("paper"), ["--particles", "6", "--runs", "3"]
    prompt = read_json(job / "config.json")["prompt"]
    soft = TrainedJob(job, potential=("keyword~2:was",)).sample(6, 3)
    had = [re.search(r"\bwas\b", text.removeprefix(prompt)) for text in soft.texts]
    assert soft.scores["log_phi"].tolist() == [0.0 if has else -2.0 for has in had]
    changes = {"prompt": OTHER, "length": 3, "seed": 1, "resampling": "systematic"}
    changes |= {"dtype": "bfloat16", "ess_threshold": 1.0, "end": (".",)}
    other = TrainedJob(job, generation=0, **changes)
    assert {one.dtype for one in other.world.base.network.parameters()} == {torch.bfloat16}
    words = "--length 3 --seed 1 --resampling systematic --dtype bfloat16 --ess-threshold 1 --end ."
    words = ["--generation", "0", "--prompt", OTHER, *words.split()]
    for options, drawn in (
        (words, other.sample(6, 3)),
        (["--potential", "keyword~2:was"], soft),
    ):
        command([str(job), *few, *options])
        seed = 1 if "--seed" in options else 0
        assert capsys.readouterr().out.endswith(f"{report(drawn, 10, seed)}\n")
    assert TrainedJob(job).generation == 1


BAD = [  # arguments behind the job, a part of the one line
    (["--generation", "7"], "generation-7"),
    (["--partcles", "20"], "unrecognized arguments: --partcles 20"),
    (["--beta", "-1"], "--beta is -1.0; give a number from 0"),
    (["--potential", "keyword"], "--potential keyword: is not understood"),
    (["--lm", "nosuch"], "nosuch"),
    (["--particles", "0"], "--particles"),
    (["--runs", "0"], "--runs"),
    (["--samples", "0"], "--samples"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_line(finished_job, arguments, words):
    assert words in refusal(finished_job("paper"), *arguments, command=command)


def test_no_job_is_one_line(tmp_path):
    assert "none/config.json" in refusal(tmp_path / "none", command=command)
