"""Weighted samples of a world or of a job: estimates, intervals, `python -m eval.sample`."""

import re

import pytest
import torch
from jobs import refusal
from worlds import letters, table_world

from distill.pair import Pair
from eval.options import Options
from eval.sample import TrainedJob, report, sample
from eval.sample import main as command
from eval.world import World
from tinystories.load import read_json
from tsmc.exact import Target
from tsmc.proposal import sequence_log_probs
from twist.potential import TextPotential


@pytest.mark.learned
@pytest.mark.parametrize("ess_threshold", [1.0, 0.0])
def test_evidence_probabilities_and_samples_agree_with_enumeration(ess_threshold):
    """Nominal 95 % intervals of log Z and of a probability, in a world of 729 texts, by particles
    that share first tokens, which their ESS does not know, and by independent ones."""
    model, twist, potential = table_world(3, 6, scale=0.5)  # a twist that knows nothing
    target = Target(model, potential)
    sequences = letters(target.tree.sequences().tolist())
    log_phi = dict(zip(sequences, potential.log_phi.tolist(), strict=True))
    phi = TextPotential([lambda texts: [log_phi[one[1:]] for one in texts]], letters, model.prompt)
    world, drawn, held = World(model, phi, {}, None), [], []
    exact = [target.log_z, target.log_sigma[1][1].exp().item()]
    for seed in range(40):
        options = Options(seed=seed, resampling="systematic", ess_threshold=ess_threshold)
        drawn.append(sample(world, Pair(model, twist), options, particles=20, runs=8))
        found = [drawn[-1].evidence(), drawn[-1].probability(lambda text: text[1] == "b")]
        assert drawn[-1].is_independent == (ess_threshold == 0)
        pairs = zip(found, exact, strict=True)
        held.append([abs(x.value - value) < x.half_width() for x, value in pairs])
    assert (torch.tensor(held).double().mean(0) >= 0.75).all()
    first, last = drawn[0], drawn[-1]
    again = sample(world, Pair(model, twist), options, particles=20, runs=8)
    assert again.texts == last.texts != first.texts
    rows = last.samples(4000)
    assert abs(sum(row["text"][1] == "b" for row in rows) / 4000 - found[1].value) < 0.04
    assert all(row["log_phi"] == pytest.approx(log_phi[row["text"][1:]]) for row in rows)
    log_p = sequence_log_probs(model, last.population.tokens.flatten(0, 1))
    torch.testing.assert_close(last.scores["log_p"], log_p)
    numbers, certain = last.probability(lambda text: 3 * (text[1] == "b")), last.probability(bool)
    assert numbers.value == pytest.approx(3 * found[1].value)
    assert certain.value == pytest.approx(1) and certain.half_width() >= 1 / last.ess


def test_the_command_prints_what_programs_draw(finished_job, capsys):
    job, prompt = finished_job("paper"), "The ugly dog said"
    assert TrainedJob(job).generation == 1
    soft = TrainedJob(job, potential=("keyword~2:was",)).sample(6, 3)
    start = len(read_json(job / "config.json")["prompt"])
    had = [re.search(r"\bwas\b", text[start:]) for text in soft.texts]
    assert soft.scores["log_phi"].tolist() == [0.0 if has else -2.0 for has in had]
    changes = {"prompt": prompt, "length": 4, "seed": 1, "resampling": "systematic"}
    changes |= {"dtype": "bfloat16", "ess_threshold": 1.0, "end": (".",)}
    other = TrainedJob(job, generation=0, **changes)
    assert {one.dtype for one in other.world.base.network.parameters()} == {torch.bfloat16}
    words = "--length 4 --seed 1 --resampling systematic --dtype bfloat16 --ess-threshold 1 --end ."
    words = ["--generation", "0", "--prompt", prompt, *words.split()]
    for options, drawn, seed in (
        (words, other.sample(6, 3), 1),
        (["--potential", "keyword~2:was"], soft, 0),
    ):
        command([str(job), "--particles", "6", "--runs", "3", *options])
        assert capsys.readouterr().out.endswith(f"{report(drawn, 10, seed)}\n")


BAD = [  # arguments behind the job, a part of the one line
    (["--generation", "7"], "generation-7"),
    (["--partcles", "20"], "unrecognized arguments: --partcles 20"),
    (["--beta", "-1"], "--beta is -1.0; give a number from 0"),
    (["--potential", "keyword"], "--potential keyword: is not understood"),
    (["--particles", "0"], "--particles"),
    (["--runs", "0"], "--runs"),
    (["--samples", "0"], "--samples"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_line(finished_job, arguments, words):
    assert words in refusal(finished_job("paper"), *arguments, command=command)
