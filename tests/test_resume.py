"""A run that is killed, interrupted or starved of disk goes on as if nothing had happened.

Two processes share one run: they compute what one computes; if one is lost the other ends.
"""

import json
import re
import shutil
import signal
from pathlib import Path

import filelock
import pytest
import torch
from jobs import JOBS, Moment, ended, products, refusal, run_main, start, start_together
from safetensors.torch import load_file

from eval import load_run
from eval.config import saved_config
from tinystories.errors import InputError

KILLED = [-signal.SIGKILL]
MOMENTS = {  # a place or phase, and whether the kill comes after it
    "pooled": [
        ("target/samples.safetensors", True),
        ("/base", False),
        ("/base", True),
        ("ladder 1 0", True),
        ("generation-0", False),
        ("generation-0", True),
        ("distillation 1", False),
        ("generation-1/state.safetensors", True),
        ("results.json", False),
    ],
    "weighted": [("twist learning 0", True), ("distillation 1", False), ("generation-1", False)],
    "dpo": [("generation-0", True), ("fine-tuning 1", False)],
}


@pytest.mark.parametrize("learner", MOMENTS)
def test_a_run_that_is_killed_and_extended_is_one_of_two_generations(tmp_path, learner):
    """It was never interrupted, and has the same files to the byte."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_main([*JOBS[learner], "--generations", 2, "--out", whole])
    arguments = [*JOBS[learner], "--out", run]
    for moment in MOMENTS[learner]:
        assert ended(start(arguments, tmp_path, moment=Moment(*moment))) == KILLED, moment
        arguments = ["--resume", run]
    run_main(arguments)
    assert json.loads((run / "results.json").read_text())["generations"][-1]["generation"] == 1
    arguments += ["--generations", 2]
    assert ended(start(arguments, tmp_path, moment=Moment("generation-2", True))) == KILLED
    run_main(["--resume", run])
    assert products(run) == products(whole)
    assert saved_config(run).change(out=str(whole)) == saved_config(whole)


@pytest.fixture
def copied(tmp_path, finished_job) -> Path:
    """A finished run that may be changed."""
    return shutil.copytree(finished_job("weighted"), tmp_path / "run")


@pytest.fixture
def halfway(copied) -> Path:
    """A run that has kept generation 0 alone."""
    shutil.rmtree(copied / "generation-1")
    (copied / "results.json").unlink()
    return copied


def test_ctrl_c_says_how_to_go_on(tmp_path, halfway, finished_job):
    moment = Moment("generation-1/model.safetensors", False, signal.SIGINT)
    assert ended(start(["--resume", halfway], tmp_path, moment=moment)) == [130]
    *_, line = (tmp_path / "errors-0").read_text().splitlines()
    assert line.endswith(f"interrupted; continue with --resume {halfway}")
    assert not (halfway / "generation-1").exists()
    run_main(["--resume", halfway])
    assert products(halfway) == products(finished_job("weighted"))


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, halfway, finished_job):
    """No file may grow beyond a limit: the fine-tuned model does."""
    assert ended(start(["--resume", halfway], tmp_path, file_limit=5_000_000)) == [2]
    *_, line = (tmp_path / "errors-0").read_text().splitlines()
    assert re.search("generation-1/model.safetensors: cannot be written .*; free space", line)
    assert not (halfway / "generation-1").exists()
    run_main(["--resume", halfway])
    assert products(halfway) == products(finished_job("weighted"))


def test_two_processes_never_write_into_one_directory(halfway):
    before = {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()}
    with filelock.FileLock(halfway / ".lock"):
        assert f"{halfway}: another process is writing there" in refusal("--resume", halfway)
    assert before == {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lost", ["base", "generation-0", "results.json"])
def test_what_is_deleted_is_made_again(copied, finished_job, lost):
    shutil.rmtree(copied / lost) if (copied / lost).is_dir() else (copied / lost).unlink()
    run_main(["--resume", copied])
    assert products(copied) == products(finished_job("weighted"))


KEPT = [f"target/{name}" for name in ("target.json", "samples.safetensors")]
KEPT += ["base/row.json", "generation-0/row.json", "config.json"]
KEPT += [f"generation-1/{name}.safetensors" for name in ("twist", "model", "state")]


@pytest.mark.parametrize("name", KEPT)
def test_a_damaged_file_is_named(copied, name):
    path = copied / name
    path.write_bytes(path.read_bytes()[:-9])
    assert f"{path}: " in refusal("--resume", copied)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 0.4}, "target: holds samples of another sigma; restore what the run was made"),
        ({"networks": {}}, "a network or potential has changed since the run began"),
        ({"length": 6.5}, "--length is 6.5; give a value of type int"),
        ({"effective_potential": "no"}, "--effective-potential is 'no'; give a value of type bool"),
        ({"potential": "toxicity"}, "--potential is 'toxicity'; give a list"),
        ({"eval_particles": []}, r"--eval-particles is \(\); give a list"),
        ({"beta": 10**400}, r"--beta is 1000.*; give at most"),
        ({"ctl_updates": 0}, "--ctl-updates is 0; give at least 1"),
        ({"learner": "published"}, "--learner is 'published'; give one of paper, weighted"),
        ({"pool_draws": 5}, "--pool-draws: no option of --learner weighted"),
    ],
)
def test_an_edited_config_is_refused(copied, change, words):
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert re.search(words, refusal("--resume", copied))
    assert re.search("config.json: holds no options of a run", refusal("--resume", copied)) or (
        change.keys() <= {"beta", "networks"}
    )


def test_a_run_older_than_an_option_has_its_default(finished_job, tmp_path):
    options = json.loads((finished_job("pooled") / "config.json").read_text())
    del options["surrogate"], options["end"], options["pool_draws"]
    (tmp_path / "config.json").write_text(json.dumps(options))
    config = saved_config(tmp_path)
    found = (config.learner.surrogate, config.run.end, config.learner.pool_draws)
    assert found == (True, "", 9000) and config.learner.pool_first_draws == 50
    with pytest.raises(InputError, match=r"holds no config\.json, so no run"):
        saved_config(finished_job("pooled") / "base")


def test_resume_takes_further_generations_alone(copied):
    line = refusal("--resume", copied, "--beta", 3, "--no-effective-potential")
    assert line.endswith("leave out --beta, --no-effective-potential")
    assert "run has 1 already; give at least 1" in refusal("--resume", copied, "--generations", 0)


def test_a_run_keeps_the_users_file(tmp_path, monkeypatch, capsys):
    """It goes on from its copy, in another place and without the original, or with another one."""
    run, own = tmp_path / "run", tmp_path / "own.py"
    own.write_text("def phi(texts):\n    return [-0.5 * text.count('w') for text in texts]\n")
    monkeypatch.chdir(tmp_path)
    run_main([*JOBS["pooled"], "--generations", 0, "--potential", "own.py:phi", "--out", run])
    assert (run / "potential" / "own.py").read_text() == own.read_text()
    own.unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_main(["--resume", run, "--generations", 1])
    for original in (None, "def phi(texts):\n    return [-9.0 for _ in texts]\n"):
        if original is not None:
            Path("own.py").write_text(original)
        drawn = load_run(run).sample(particles=3, runs=2)
        log_phi = [-0.5 * text.count("w") for text in drawn.texts]
        assert drawn.scores["log_phi"].tolist() == log_phi
    copy = run / "potential" / "own.py"
    copy.write_text(copy.read_text() + "\n")
    assert "samples of another sigma; restore what the run was made" in refusal("--resume", run)
    with pytest.raises(InputError, match=r"own\.py changed since the run was made"):
        load_run(run).sample()


def test_a_failed_step_names_its_phase(tmp_path):
    arguments = [*JOBS["weighted"], "--ctl-learning-rate", 1, "--ctl-updates", 400]
    line = refusal(*arguments, "--out", tmp_path / "run")
    assert "twist learning of generation 0: psi has exploded" in line
    assert not (tmp_path / "run" / "generation-0").exists()


def assert_same_run(one: Path, two: Path) -> None:
    """Two runs have files of the same kind, and numbers that agree up to rounding.

    A product rounded otherwise may flip a draw, so texts and what is computed of them may differ.
    """
    assert {path.relative_to(one) for path in one.rglob("[!.]*")} == {
        path.relative_to(two) for path in two.rglob("[!.]*")
    }
    assert (one / "base/row.json").read_bytes() == (two / "base/row.json").read_bytes()
    found, wanted = (json.loads((run / "results.json").read_text()) for run in (two, one))
    assert found.keys() == wanted.keys() and found["scores"] == wanted["scores"]
    for row, expected in zip(found["generations"], wanted["generations"], strict=True):
        assert row.keys() == expected.keys()
        for name in ("kl_target_proposal", "kl_target_model"):
            assert row[name] == pytest.approx(expected[name], abs=5e-3)
    for path in one.glob("generation-*/[!s]*.safetensors"):
        expected, tensors = load_file(path), load_file(two / path.relative_to(one))
        assert tensors.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(tensors[key], expected[key], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("learner", ["weighted", "pooled"])
def test_a_job_of_two_makes_the_run_of_one_even_if_it_is_killed(tmp_path, finished_job, learner):
    """Two begin, one is lost and the other ends; two finish the run."""
    two = tmp_path / "two"
    moment = Moment("generation-0", True)  # only process 0 writes
    jobs = start_together([*JOBS[learner], "--out", two], tmp_path, moment=moment)
    assert ended(*jobs) == [-signal.SIGKILL, 2]
    (line,) = (tmp_path / "errors-1").read_text().splitlines()
    assert "another process of this job has ended" in line and "--resume" in line
    assert ended(*start_together(["--resume", two], tmp_path)) == [0, 0]
    assert (tmp_path / "output-1").read_text() == ""
    assert_same_run(finished_job(learner), two)
