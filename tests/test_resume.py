"""A job that is killed goes on as if nothing had happened, or is refused. Two processes share one
job; if one is lost, the other ends."""

import dataclasses
import shutil
import signal
from functools import partial

import filelock
import pytest
import torch
from jobs import JOBS, exit_codes, job, products, refusal, run_main, signal_at
from safetensors.torch import load_file
from worlds import rare_potential, tiny_conditional

from distill.pair import Pair
from distill.paper import Paper
from distill.policy import DPO
from eval.options import Options, build
from eval.world import load_world
from tinystories.load import read_json
from tsmc.streams import Streams, gathered, join_processes, process

MOMENTS = {  # before what the job is killed, one time after the other
    "paper": "base/row.json; twist learning 0; generation-0/row.json; distillation 1; results.json",
    "dpo": "fine-tuning 1; generation-1/pair.safetensors",
}


@pytest.mark.parametrize("learner", MOMENTS)
def test_a_job_that_is_killed_and_goes_on_is_one_that_was_not_to_the_byte(
    tmp_path, learner, finished_job
):
    """A row is written last. A job of one generation less, which is extended, is the same as well."""
    path, whole = tmp_path / "job", finished_job(learner)
    arguments = [*JOBS[learner], "--out", path]
    for moment in MOMENTS[learner].split("; "):
        kill = partial(signal_at, moment)
        assert exit_codes(1, job, arguments, tmp_path, kill) == [-signal.SIGKILL], moment
        assert not (path / moment).exists()
        arguments = ["--resume", path]
        if moment == "generation-0/row.json":
            assert (path / "generation-0/pair.safetensors").exists()
    run_main(arguments)
    assert products(path) == products(whole)
    shutil.rmtree(path / "generation-1")
    run_main([*arguments, "--generations", 0])
    assert len(read_json(path / "results.json")["generations"]) == 1
    run_main([*arguments, "--generations", 1])
    assert products(path) == products(whole)
    configs = [read_json(folder / "config.json") | {"out": ""} for folder in (path, whole)]
    assert configs[0] == configs[1]


def test_ctrl_c_says_how_to_go_on(tmp_path, finished_job):
    path = shutil.copytree(finished_job("paper"), tmp_path / "job")
    (path / "generation-1/row.json").unlink()
    interrupt = partial(signal_at, "generation-1/pair.safetensors", signal.SIGINT)
    assert exit_codes(1, job, ["--resume", path], tmp_path, interrupt) == [130]
    *_, line = (tmp_path / "errors-0").read_text().splitlines()
    assert line == f"main.py: interrupted; continue with --resume {path}"
    assert not (path / "generation-1/row.json").exists()


def test_a_resume_that_is_refused_changes_nothing(tmp_path, finished_job):
    path = shutil.copytree(finished_job("paper"), tmp_path / "job")
    before = products(path)
    for options in (["--beta", 3], ["--learner", "dpo"], ["--no-effective-potential"]):
        assert "give none but --generations" in refusal("--resume", path, *options)
    assert "--out" in refusal(*JOBS["paper"], "--out", path)
    with filelock.FileLock(path / ".lock"):
        assert f"{path}: another process is writing there" in refusal("--resume", path)
    assert products(path) == before
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"length": 5', '"length": 6', 1))
    assert "have changed since it began" in refusal("--resume", path)
    (path / "config.json").write_text(config)
    pair = path / "generation-1/pair.safetensors"
    pair.write_bytes(pair.read_bytes()[:-9])
    assert refusal("--resume", path, "--generations", 2)
    (path / "config.json").write_text("{")
    assert "config.json" in refusal("--resume", path) or "Expecting" in refusal("--resume", path)


def test_exact_samples_of_a_job_are_those_of_its_next_run_and_of_others(finished_job):
    path = finished_job("paper")
    options = build(Options, read_json(path / "config.json"))
    stored = load_file(path / "target/samples.safetensors")
    other = dataclasses.replace(options, seed=9, target=str(path / "target"))
    for world in (load_world(options, path), load_world(other)):
        assert torch.equal(world.exact.tokens, stored["tokens"].long())
        assert world.exact.log_z == read_json(path / "results.json")["target"]["log_z"]


@pytest.mark.parametrize("learner", ["paper", "dpo"])
def test_a_job_of_two_processes_is_that_of_one_to_the_byte(tmp_path, finished_job, learner):
    """Also where two begin, one is lost and the other ends, and two finish the job."""
    path = tmp_path / "job"
    arguments = [*JOBS[learner], "--out", path]
    if learner == "paper":
        kill = partial(signal_at, "generation-0/row.json")  # only process 0 writes
        assert exit_codes(2, job, arguments, tmp_path, kill) == [-9, 1]
        arguments = ["--resume", path]
    assert exit_codes(2, job, arguments, tmp_path) == [0, 0]
    assert (tmp_path / "output-1").read_text() == ""
    assert products(path) == products(finished_job(learner))


SIZES = {"particles": 250, "distill_runs": 7, "ctl_batch_size": 7, "ctl_updates": 2}
SIZES |= {"distill_updates": 2, "student": "lora", "updates": 2, "batch_size": 13}
STEPS = {  # a learner, a step that returns a module, how many texts it scores
    "CTL": (Paper, lambda one: one.learn_twist(tiny_conditional(1, (6,)), 1).twist, 14),
    "LoRA": (Paper, lambda one: one.distil(Pair(one.base, None), 1).network, 1750),
    "DPO": (DPO, lambda one: one.learn_twist(one.base, 0).model.network, 26),
}


def step_of(name: str) -> tuple[int, list[torch.Tensor]]:
    """How many texts this process has scored, and what has been learned."""
    kind, step, _ = STEPS[name]
    scored = []

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        scored.append(len(tokens))
        return rare_potential(tokens)

    learned = step(kind(tiny_conditional(0, (6,)), log_phi, Options(**SIZES), Streams(0)))
    if process()[1] == 2:
        assert gathered(process()[0]) == [0, 1]
    return sum(scored), list(learned.state_dict().values())


def test_a_step_of_two_processes_is_that_of_one(tmp_path):
    """They share the draws of runs, and learn alike."""
    one = {name: step_of(name) for name in STEPS}  # first, so that forks have all libraries

    def save() -> None:
        join_processes(torch.device("cpu"))
        torch.save({name: step_of(name) for name in STEPS}, tmp_path / f"{process()[0]}.pt")
        torch.distributed.destroy_process_group()

    assert exit_codes(2, save) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, (_, _, count) in STEPS.items():
        assert one[name][0] == count
        scored = (first[name][0], second[name][0])
        assert scored == ((1000, 750) if name == "LoRA" else (count, count))
        for found in (first, second):
            torch.testing.assert_close(found[name][1], one[name][1], rtol=0, atol=0)
