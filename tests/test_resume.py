"""A job that is killed goes on as if nothing had happened; two processes may share one job."""

import shutil
import signal

import filelock
import pytest
from jobs import JOBS, exit_codes, products, refusal, run_main

from tinystories.load import read_json

MOMENTS = {  # before what the job is killed, one time after the other
    "paper": "base/row.json; generation-0/row.json; distillation 1; results.json",
    "pooled": "ladder 1 0; sampling 1 0; generation-1/pair.safetensors",
    "dpo": "fine-tuning 1",
}


@pytest.mark.parametrize("learner", MOMENTS)
def test_a_job_that_is_killed_and_goes_on_is_one_that_was_not(tmp_path, learner, finished_job):
    """To the byte, and a row is written last. A job of one generation less that is extended is the
    same as well."""
    path, whole = tmp_path / "job", finished_job(learner)
    arguments = [*JOBS[learner], "--out", path]
    for moment in MOMENTS[learner].split("; "):
        assert exit_codes(1, arguments, tmp_path, moment) == [-signal.SIGKILL], moment
        assert not (path / moment).exists()
        arguments = ["--resume", path]
        if moment == "generation-0/row.json":
            assert (path / "generation-0/pair.safetensors").exists()
    run_main(arguments)
    assert products(path) == products(whole)
    configs = [read_json(folder / "config.json") | {"out": ""} for folder in (path, whole)]
    assert configs[0] == configs[1]
    shutil.rmtree(path / "generation-1")
    run_main([*arguments, "--generations", 0])
    assert len(read_json(path / "results.json")["generations"]) == 1
    run_main([*arguments, "--generations", 1])
    assert products(path) == products(whole)


@pytest.mark.parametrize("learner", ["paper", "dpo"])
def test_a_job_of_two_processes_is_that_of_one(tmp_path, finished_job, learner):
    """To the byte, also where two begin, one is lost and the other ends, and two finish the job."""
    path = tmp_path / "job"
    arguments = [*JOBS[learner], "--out", path]
    if learner == "paper":  # only process 0 writes
        codes = exit_codes(2, arguments, tmp_path, "generation-0/row.json")
        assert codes == [-signal.SIGKILL, 1]
        arguments = ["--resume", path]
    assert exit_codes(2, arguments, tmp_path) == [0, 0]
    assert (tmp_path / "output-1").read_text() == ""
    assert products(path) == products(finished_job(learner))


def test_ctrl_c_says_how_to_go_on(tmp_path, finished_job):
    path = shutil.copytree(finished_job("paper"), tmp_path / "job")
    (path / "generation-1/row.json").unlink()
    moment = "generation-1/pair.safetensors"
    assert exit_codes(1, ["--resume", path], tmp_path, moment, signal.SIGINT) == [130]
    *_, line = (tmp_path / "errors-0").read_text().splitlines()
    assert line == f"main.py: interrupted; continue with --resume {path}"
    assert not (path / "generation-1/row.json").exists()


def test_a_resume_that_is_refused_changes_nothing(tmp_path, finished_job):
    path = shutil.copytree(finished_job("paper"), tmp_path / "job")
    before, config = products(path), path / "config.json"
    for options in (["--beta", 3], ["--learner", "dpo"], ["--no-effective-potential"]):
        assert "give none but --generations" in refusal("--resume", path, *options)
    with filelock.FileLock(path / ".lock"):
        assert f"{path}: another process is writing there" in refusal("--resume", path)
    config.write_text(config.read_text().replace('"length": 3', '"length": 4', 1))
    assert "have changed since it began" in refusal("--resume", path)
    assert products(path) == before
