"""A run that is killed, interrupted or starved of disk goes on as if nothing had happened, with
what it was made with. Two processes share one run; if one is lost the other ends."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import filelock
import pytest
import torch
from eval.table import read_results
from jobs import JOBS, contents, exit_codes, job, products, refusal, run_main, signal_at
from safetensors.torch import load_file, save_file
from tinystories.files import read_metadata
from worlds import rare_potential, tiny_conditional

from distill import DPO, BaselineOptions, Paper, PaperOptions, Pooled, PooledOptions, Streams
from distill.pair import Pair
from eval.options import saved_options
from eval.sample import TrainedJob
from tsmc import processes

MOMENTS = {  # before what the run is killed, one time after the other
    "pooled": "base/samples.safetensors; ladder 0; generation-0/pair.safetensors; "
    "generation-0/row.json; distillation 1; results.json",
    "paper": "base/row.json; twist learning 0; distillation 1; generation-1/row.json",
    "dpo": "fine-tuning 1",
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
    assert is_killed([*arguments, "--generations", 2], "results.json")
    run_main(arguments)
    assert products(run) == products(whole)
    assert dataclasses.replace(saved_options(run), out=str(whole)) == saved_options(whole)


@pytest.fixture
def copied(tmp_path, finished_job) -> Path:
    """A finished run that may be changed."""
    return shutil.copytree(finished_job("paper"), tmp_path / "run")


PAIR = "generation-1/pair.safetensors"
INTERRUPT = partial(signal_at, PAIR, signal.SIGINT)
FULL_DISK = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
STOPS = [
    (INTERRUPT, 130, "interrupted; continue with --resume .*/run'?$"),
    (FULL_DISK, 2, f"{PAIR}: cannot be written .*; free space"),  # the pair is larger
]


@pytest.mark.parametrize(("prepare", "code", "words"), STOPS)
def test_what_stops_a_run_is_one_line_and_costs_one_generation(
    tmp_path, copied, finished_job, prepare, code, words
):
    """What has been deleted is made again as well."""
    for name in ("base", "generation-1"):
        shutil.rmtree(copied / name)
    assert exit_codes(1, job, ["--resume", copied], tmp_path, prepare) == [code]
    *_, line = (tmp_path / "errors-0").read_text().splitlines()
    assert re.search(words, line), line
    assert (copied / "base/row.json").exists() and not (copied / "generation-1/row.json").exists()
    assert not list(copied.rglob("*.partial"))
    (copied / "results.json").unlink()
    shutil.rmtree(copied / "generation-0")  # the one behind it is made again, too
    run_main(["--resume", copied])
    assert products(copied) == products(finished_job("paper"))


def test_only_what_a_killed_process_has_left_is_deleted(copied):
    left = [".config.json.7.partial", "generation-0/.pair.safetensors.77.partial"]
    users = [".notes.partial", "base/.mine.json.partial", "mine/.row.json.7.partial"]
    (copied / "mine").mkdir()
    for name in (*left, *users):
        (copied / name).write_text("")
    run_main(["--resume", copied])
    assert [(copied / name).exists() for name in (*left, *users)] == [False] * 2 + [True] * 3


def test_without_locks_it_says_so_and_goes_on(copied, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run_main(["--resume", copied])
    assert f"{copied}: files cannot be locked there (No locks" in capsys.readouterr().err


def test_a_resume_that_is_refused_changes_nothing(copied, finished_job):
    before = contents(copied)
    line = refusal("--resume", copied, "--beta", 3, "--no-effective-potential")
    assert line.endswith("leave out --beta, --effective-potential")
    assert "did you mean --generations?" in refusal("--resume", copied, "--generation", 2)
    line = refusal("--resume", finished_job("pooled"), "--pool-draws", 3)
    assert line.endswith("leave out --pool-draws")
    assert "run has 1 already; give at least 1" in refusal("--resume", copied, "--generations", 0)
    (copied / "generation-2").write_text("mine")
    line = refusal("--resume", copied, "--generations", 2)
    assert "generation-2: is no folder, as the job needs; move it away" in line
    (copied / "generation-2").unlink()
    with filelock.FileLock(copied / ".lock"):
        assert f"{copied}: another process is writing there" in refusal("--resume", copied)
    assert contents(copied) == before


KEPT = ["config.json", "target/samples.safetensors", "base/samples.safetensors", "base/row.json"]
KEPT += ["generation-0/row.json", "generation-1/state.safetensors", "generation-1/pair.safetensors"]
CHANGED = [  # a file of the run; its options that are others now, a tensor, or bytes; what is said
    *((name, None, f"{name}: ") for name in KEPT),  # is cut off
    ("generation-0/row.json", b"{}", "generation-0/row.json: holds no row of a table"),
    (
        "generation-0/row.json",
        b'{"examples": []}',
        "generation-0/row.json: holds no row of a table",
    ),
    ("base/row.json", b'{"base": ["examples"]}', "base/row.json: holds no row of a table"),
    ("target/samples.safetensors", "tokens", "samples.safetensors: holds no exact samples"),
    ("config.json", {"beta": 0.4}, "target: holds samples of another sigma, whose beta differs"),
    ("config.json", {"length": 6.5}, "holds no options of a job .*--length is 6.5; .* type int"),
    ("config.json", {"networks": None}, "--networks: no option"),
    ("target/samples.safetensors", "log_p", "log_p of one of its texts is .* now, and was .*;"),
    ("base/samples.safetensors", "log_p", "log_p of one of its texts is .* now, and was .*;"),
    ("base/samples.safetensors", "vectors", "the sentence encoder gives other vectors"),
]


@pytest.mark.parametrize(("name", "change", "words"), CHANGED)
def test_a_file_that_is_damaged_or_changed_is_named(copied, name, change, words):
    path = copied / name
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif isinstance(change, str):
        tensors, told = load_file(path), read_metadata(path)
        save_file(tensors | {change: -tensors[change]}, path, told)
    else:
        path.write_bytes(change or path.read_bytes()[:-9])
    assert re.search(words, refusal("--resume", copied))


def test_whatever_a_users_file_reads_must_stay_as_it_was(tmp_path, monkeypatch):
    """The module that lies beside it, and its data, even while the job learns; a new comment
    changes nothing."""
    run, own, data = tmp_path / "run", tmp_path / "own.py", tmp_path / "data"
    own.write_text("from mine import phi\n")
    lines = "import pathlib\nDATA = pathlib.Path(__file__).with_name('data')\ndef phi(texts):\n"
    lines += "    return [-0.5 * sum(map(text.count, DATA.read_text())) for text in texts]\n"
    (tmp_path / "mine.py").write_text(lines)
    data.write_text("w")
    run_main([*JOBS["pooled"], "--generations", 0, "--potential", f"{own}:phi", "--out", run])
    drawn = TrainedJob(run).sample(particles=3, runs=2)
    assert drawn.scores["log_phi"].tolist() == [-0.5 * text.count("w") for text in drawn.texts]
    own.write_text(own.read_text() + "# a comment\n")
    run_main(["--resume", run])
    data.write_text("ae")
    assert "log_phi of one of its texts is" in refusal("--resume", run)
    with pytest.raises(ValueError, match="log_phi of one of its texts is"):
        TrainedJob(run)
    learn = Pooled.first_twist
    change = lambda learner: [learn(learner), data.write_text("w")][0]  # noqa: E731
    monkeypatch.setattr(Pooled, "first_twist", change)
    line = refusal(*JOBS["pooled"], "--potential", f"{own}:phi", "--out", tmp_path / "other")
    assert "log_phi of one of its texts is" in line


@pytest.mark.learned
def test_a_job_of_two_makes_the_run_of_one_even_if_it_is_killed(tmp_path, finished_job):
    """Two begin, one is lost and the other ends; two finish the run.

    Its files are the same, and numbers agree up to rounding. A product rounded otherwise may flip a
    draw, so texts and what is computed of them may differ.
    """
    one, two = finished_job("paper"), tmp_path / "two"
    kill = partial(signal_at, "generation-0/row.json")  # only process 0 writes
    assert exit_codes(2, job, [*JOBS["paper"], "--out", two], tmp_path, kill) == [-9, 1]
    assert exit_codes(2, job, ["--resume", two], tmp_path) == [0, 0]
    assert (tmp_path / "output-1").read_text() == ""
    made, wanted = contents(two), contents(one)
    assert made.keys() == wanted.keys() and made["base/row.json"] == wanted["base/row.json"]
    rows = [read_results(run)["generations"] for run in (two, one)]
    for row, expected in zip(*rows, strict=True):
        assert row.keys() == expected.keys() and row["scores"] == expected["scores"]
        for name in ("kl_target_proposal", "kl_target_model"):
            assert row[name] == pytest.approx(expected[name], abs=5e-3)


END = 6
STUDENT = tiny_conditional(1, END)
SIZES = {"particles": 5, "distill_runs": 7, "ctl_batch_size": 7}
PAPER = PaperOptions(**SIZES, ctl_updates=2, distill_updates=2, student="lora")
POOL = {"pool_first_draws": 99, "pool_first_rounds": 2, "pool_first_updates": 2}
POOLED = PooledOptions(**POOL, pool_draws=45, pool_updates=2, pool_batch_size=9)
TUNED = BaselineOptions(updates=2, batch_size=13)
STEPS = {  # a learner, its options, a step that returns a module, how many texts it scores
    "CTL": (Paper, PAPER, lambda one: one.learn_twist(STUDENT, 1).twist, 14),
    "LoRA": (Paper, PAPER, lambda one: one.distil(Pair(one.base, None), 1).network, 35),
    "pooled": (Pooled, POOLED, lambda one: one.distil(one.first_twist(), 1).adapter, 144),
    "dpo": (DPO, TUNED, lambda one: one.first_twist().model.network, 26),
}


def step_of(name: str) -> tuple[int, list]:
    """How many texts this process has scored; losses, and what has been learned."""
    kind, options, step, _ = STEPS[name]
    scored = []

    def log_phi(tokens: torch.Tensor) -> torch.Tensor:
        scored.append(len(tokens))
        return rare_potential(tokens)

    learner = kind(tiny_conditional(0, END), log_phi, options, Streams(0, rows=20))
    learned = step(learner)
    if processes.count() == 2:
        with pytest.raises(ValueError, match=r"^2 processes cannot share a batch of 1; start"):
            processes.own_rows(1)
        assert processes.gather_rows(torch.arange(5)[processes.own_rows(5)]).tolist() == [*range(5)]
        for tensor in learned.state_dict().values():
            tensor.add_(processes.rank())
        processes.align([learned])  # the tensors are those of process 0 again
    losses = [record["loss"] for record in learner.records if "loss" in record]
    return sum(scored), [torch.tensor(losses), list(learned.state_dict().values())]


@pytest.mark.learned
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_two_processes_is_that_of_one(name, tmp_path):
    scored, wanted = step_of(name)  # first, so that forked processes have all libraries
    assert scored == STEPS[name][-1]

    def save() -> None:
        processes.join(torch.device("cpu"))
        torch.save(step_of(name), tmp_path / f"{processes.rank()}.pt")
        processes.leave()

    assert exit_codes(2, save) == [0, 0]
    (some, first), (others, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert some + others == scored and min(some, others) > 0.25 * scored
    for found in (first, second):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
