"""A run that is killed, interrupted or starved of disk goes on as if nothing had happened.

Two processes share one run: they compute what one computes; if one is lost the other ends.
"""

import json
import re
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import filelock
import pytest
import torch
from jobs import JOBS, contents, exit_codes, job, products, refusal, run_main, signal_at
from safetensors.torch import load_file

from eval.config import saved_config
from eval.sample import TrainedRun
from eval.table import read_results
from tinystories.errors import InputError

MOMENTS = {  # when the run is killed, one time after the other
    "pooled": "after target/samples.safetensors; before /base; after /base; after ladder 1 0; "
    "before generation-0; after generation-0; before distillation 1; "
    "after generation-1/state.safetensors; before results.json",
    "weighted": "after twist learning 0; before distillation 1; before generation-1",
    "dpo": "after generation-0; before fine-tuning 1",
}


@pytest.mark.parametrize("learner", MOMENTS)
def test_a_run_that_is_killed_and_extended_is_one_of_two_generations(tmp_path, learner):
    """It was never interrupted, and has the same files to the byte."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_main([*JOBS[learner], "--generations", 2, "--out", whole])

    def is_killed(arguments: list, moment: str) -> bool:
        return exit_codes(1, job, arguments, tmp_path, partial(signal_at, moment)) == [-9]

    arguments = [*JOBS[learner], "--out", run]
    for moment in MOMENTS[learner].split("; "):
        assert is_killed(arguments, moment), moment
        arguments = ["--resume", run]
    run_main(arguments)
    assert read_results(run)["generations"][-1]["generation"] == 1
    assert is_killed([*arguments, "--generations", 2], "after generation-2")
    run_main(arguments)
    assert products(run) == products(whole)
    assert saved_config(run).change(out=str(whole)) == saved_config(whole)


@pytest.fixture
def copied(tmp_path, finished_job) -> Path:
    """A finished run that may be changed."""
    return shutil.copytree(finished_job("weighted"), tmp_path / "run")


MODEL = "generation-1/model.safetensors"
INTERRUPT = partial(signal_at, f"before {MODEL}", signal.SIGINT)
FULL_DISK = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))


@pytest.mark.parametrize(
    ("prepare", "code", "words"),
    [
        (INTERRUPT, 130, "interrupted; continue with --resume .*/run$"),
        (FULL_DISK, 2, f"{MODEL}: cannot be written .*; free space"),  # the model is larger
    ],
)
def test_what_stops_a_run_is_one_line_and_costs_one_generation(
    tmp_path, copied, finished_job, prepare, code, words
):
    """What has been deleted is made again as well."""
    for name in ("base", "generation-1"):
        shutil.rmtree(copied / name)
    assert exit_codes(1, job, ["--resume", copied], tmp_path, prepare) == [code]
    *_, line = (tmp_path / "errors-0").read_text().splitlines()
    assert re.search(words, line), line
    assert (copied / "base").exists() and not (copied / "generation-1").exists()
    (copied / "results.json").unlink()
    run_main(["--resume", copied])
    assert products(copied) == products(finished_job("weighted"))


def test_generations_behind_a_lost_one_are_made_again(copied, finished_job):
    shutil.rmtree(copied / "generation-0")
    run_main(["--resume", copied])
    assert products(copied) == products(finished_job("weighted"))


def test_a_resume_that_is_refused_changes_nothing(copied):
    before = contents(copied)
    line = refusal("--resume", copied, "--beta", 3, "--no-effective-potential")
    assert line.endswith("leave out --beta, --no-effective-potential")
    assert "run has 1 already; give at least 1" in refusal("--resume", copied, "--generations", 0)
    with filelock.FileLock(copied / ".lock"):
        assert f"{copied}: another process is writing there" in refusal("--resume", copied)
    assert contents(copied) == before


KEPT = ["config.json", "target/samples.safetensors", "base/row.json", "generation-0/row.json"]
KEPT += [f"generation-1/{name}.safetensors" for name in ("twist", "model", "state")]
KEPT += ["generation-1/pair.json"]


@pytest.mark.parametrize("name", KEPT)
def test_a_damaged_file_is_named(copied, name):
    path = copied / name
    path.write_bytes(path.read_bytes()[:-9])
    assert f"{path}: " in refusal("--resume", copied)


EDITED = [  # what is changed, and what is said of it
    ({"beta": 0.4}, "target: holds samples of another sigma; restore what it was drawn with"),
    ({"networks": {}}, "lm, similarity_model, toxicity_model changed since the run was made"),
]
EDITED += [
    (change, f"config.json: holds no options of a run .{words}")
    for change, words in (
        ({"length": 6.5}, "--length is 6.5; give a value of type int"),
        ({"length": True}, "--length is True; give a value of type int"),
        ({"effective_potential": "no"}, "--effective-potential is 'no'; give a value of type bool"),
        ({"potential": "toxicity"}, "--potential is 'toxicity'; give a list"),
        ({"eval_particles": []}, r"--eval-particles is \(\); give a list"),
        ({"beta": 10**400}, "--beta is 1000.*; give at most"),
        ({"pool_draws": 5}, "--pool-draws: no option of --learner weighted"),
    )
]


@pytest.mark.parametrize(("change", "words"), EDITED)
def test_an_edited_config_is_refused(copied, change, words):
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert re.search(words, refusal("--resume", copied))


def test_a_run_older_than_an_option_has_its_default(finished_job, tmp_path):
    options = json.loads((finished_job("pooled") / "config.json").read_text())
    del options["surrogate"], options["end"], options["pool_draws"]
    (tmp_path / "config.json").write_text(json.dumps(options))
    config = saved_config(tmp_path)
    found = (config.learner.surrogate, config.run.end, config.learner.pool_draws)
    assert found == (True, "", 9000) and config.learner.pool_first_draws == 50
    with pytest.raises(InputError, match=r"config\.json: no such file; name a run"):
        saved_config(finished_job("pooled") / "base")


def test_a_file_of_the_user_must_stay_as_it_was(tmp_path):
    run, own = tmp_path / "run", tmp_path / "own.py"
    own.write_text("def phi(texts):\n    return [-0.5 * text.count('w') for text in texts]\n")
    run_main([*JOBS["pooled"], "--generations", 0, "--potential", f"{own}:phi", "--out", run])
    drawn = TrainedRun(run).sample(particles=3, runs=2)
    log_phi = [-0.5 * text.count("w") for text in drawn.texts]
    assert drawn.scores["log_phi"].tolist() == log_phi
    own.write_text(own.read_text() + "\n")
    assert "own.py changed since the run was made" in refusal("--resume", run)
    with pytest.raises(InputError, match=r"own\.py changed since the run was made"):
        TrainedRun(run)


@pytest.mark.parametrize("learner", ["weighted", "pooled"])
def test_a_job_of_two_makes_the_run_of_one_even_if_it_is_killed(tmp_path, finished_job, learner):
    """Two begin, one is lost and the other ends; two finish the run.

    Its files are the same, and numbers agree up to rounding. A product rounded otherwise may flip a
    draw, so texts and what is computed of them may differ.
    """
    one, two = finished_job(learner), tmp_path / "two"
    kill = partial(signal_at, "after generation-0")  # only process 0 writes
    assert exit_codes(2, job, [*JOBS[learner], "--out", two], tmp_path, kill) == [-9, 1]
    assert exit_codes(2, job, ["--resume", two], tmp_path) == [0, 0]
    assert (tmp_path / "output-1").read_text() == ""
    made, wanted = contents(two), contents(one)
    assert made.keys() == wanted.keys() and made["base/row.json"] == wanted["base/row.json"]
    rows = [read_results(run)["generations"] for run in (two, one)]
    for row, expected in zip(*rows, strict=True):
        assert row.keys() == expected.keys() and row["scores"] == expected["scores"]
        for name in ("kl_target_proposal", "kl_target_model"):
            assert row[name] == pytest.approx(expected[name], abs=5e-3)
    for path in one.glob("generation-*/[!s]*.safetensors"):
        tensors = load_file(two / path.relative_to(one))
        torch.testing.assert_close(tensors, load_file(path), rtol=1e-2, atol=1e-3)
