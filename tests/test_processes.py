"""Any number of processes goes on with a run that any other number has begun; a job whose processes disagree ends at once."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from jobs import lines_of, start, start_together, wait_for

SMALL = [
    *("--method", "distilled", "--generations", "1"),
    *("--ctl-updates", "12", "--ctl-batch-size", "5", "--particles", "4", "--distill-runs", "12"),
    *("--distill-updates", "12", "--distill-batch-size", "5", "--eval-runs", "12", "--eval-particles", "4"),
    *("--eval-base-samples", "12", "--rows", "4", "--length", "4", "--eval-target-proposals", "48", "--beta", "0.2"),
    *("--save-every", "0"),
]
PHASES = ("0 twist learning", "0 evaluation", "1 sampling", "1 distillation")  # of twelve steps or chunks each


def records_of(run: Path) -> list[dict]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def phase_of(record: dict) -> str:
    """A name for a phase in one generation."""
    m = record["generation"]
    return record["phase"] if m is None else f"{m} {record['phase']}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that one process makes and nothing happens to."""
    place = tmp_path_factory.mktemp("whole")
    process = start([*SMALL, "--keep-states", "--out", str(place / "run")], place / "errors")
    process.join()
    assert process.exitcode == 0, (place / "errors").read_text()
    return place / "run"


def assert_alike(found, expected, where: str = "") -> None:
    """Equal up to the rounding of float32."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_alike(found[name], expected[name], f"{where} {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_alike(*pair, f"{where} {number}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-5), where
    else:
        assert found == expected, where


@pytest.mark.slow
def test_any_number_of_processes_goes_on_in_every_phase(tmp_path, whole):
    """1, 2 and 3 processes in turn, each killed inside the phase that it shares with the others, and one at the end."""
    run, arguments = tmp_path / "run", [*SMALL, "--out", str(tmp_path / "run")]
    first = {}
    for number, record in enumerate(records_of(whole)):
        first.setdefault(phase_of(record), number)
    for phase in PHASES:
        for count in (1, 2, 3):
            jobs = start_together([arguments] * count, tmp_path)
            wait_for(jobs[0], run, first[phase] + 2 * count - 1)
            assert jobs[0].exitcode is None, (phase, count, (tmp_path / "errors-0").read_text())
            for job in jobs:
                job.kill()
                job.join()
                assert job.exitcode in (-signal.SIGKILL, 2)
            assert first[phase] < lines_of(run) < first[phase] + 12, (phase, count)
            arguments = ["--resume", str(run)]
    (last,) = start_together([arguments], tmp_path)
    last.join()
    assert last.exitcode == 0, (tmp_path / "errors-0").read_text()
    assert_alike(*(json.loads((path / "results.json").read_text()) for path in (run, whole)), "results")
    assert Counter(map(phase_of, records_of(run))) == Counter(map(phase_of, records_of(whole)))
    rows = [[json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()] for path in (run, whole)]
    assert Counter(row["source"] for row in rows[0]) == Counter(row["source"] for row in rows[1])
    assert not (run / "resume").exists()


@pytest.mark.slow
def test_kills_of_two_processes_change_nothing(tmp_path):
    """5 kills, or as many as TSMC_KILLS says, of both; results as of two processes that nothing happens to, to the byte."""
    for job in start_together([[*SMALL, "--out", str(tmp_path / "whole")]] * 2, tmp_path):
        job.join()
        assert job.exitcode == 0, (tmp_path / "errors-0").read_text()
    moments, steps, kills = random.Random(0), lines_of(tmp_path / "whole"), int(os.environ.get("TSMC_KILLS", 5))
    run, arguments, killed = tmp_path / "run", [*SMALL, "--out", str(tmp_path / "run")], 0
    for kill in range(kills):
        jobs = start_together([arguments] * 2, tmp_path)
        wait_for(jobs[0], run, round(steps * (kill + moments.random()) / kills))
        time.sleep(moments.random() * 0.05)
        for job in jobs:
            job.kill()
            job.join()
        killed += jobs[0].exitcode == -signal.SIGKILL
        if (run / "resume" / "start").exists() or (run / "results.json").exists():
            arguments = ["--resume", str(run)]
        else:
            shutil.rmtree(run, ignore_errors=True)
    for job in start_together([arguments] * 2, tmp_path):
        job.join()
        assert job.exitcode == 0, (tmp_path / "errors-0").read_text()
    assert killed >= kills // 2
    for name in ("results.json", "samples.jsonl", "metrics.jsonl", "generation-1/model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_two_processes_end_a_run_of_which_only_the_results_are_missing(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "results.json").unlink()
    jobs = start_together([["--resume", str(run)]] * 2, tmp_path)
    for number, job in enumerate(jobs):
        job.join()
        assert job.exitcode == 0, (tmp_path / f"errors-{number}").read_text()
    assert_alike(*(json.loads((path / "results.json").read_text()) for path in (run, whole)), "results")
    assert "Generation 1" in (tmp_path / "output-0").read_text() and (tmp_path / "output-1").read_text() == ""


def test_a_finished_run_prints_its_table_once(tmp_path, whole):
    for job in start_together([["--resume", str(whole)]] * 2, tmp_path):
        job.join()
        assert job.exitcode == 0
    assert "Generation 1" in (tmp_path / "output-0").read_text() and (tmp_path / "output-1").read_text() == ""


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (["--seed", "1"], "--seed"),
        (["--ctl-updates", "7"], "--ctl-updates"),
        (["--lm", "elsewhere", "--beta", "0.5"], "--beta, --lm"),
        (["--out", "elsewhere"], "--out"),
    ],
)
def test_processes_that_were_started_differently_all_say_so(tmp_path, others, words):
    arguments = [*SMALL, "--out", str(tmp_path / "run")]
    jobs = start_together([arguments, arguments, [*arguments, *others]], tmp_path)
    for number, job in enumerate(jobs):
        job.join()
        (line,) = (tmp_path / f"errors-{number}").read_text().splitlines()
        assert job.exitcode == 2 and f"differ in {words}; start all of them alike" in line
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_continued_by_some_and_begun_by_others(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "results.json").unlink()
    jobs = start_together([["--resume", str(run)], [*SMALL, "--keep-states", "--out", str(whole)]], tmp_path)
    for number, job in enumerate(jobs):
        job.join()
        (line,) = (tmp_path / f"errors-{number}").read_text().splitlines()
        assert job.exitcode == 2 and "differ in --resume" in line


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"WORLD_SIZE": 2}, "RANK"),
        ({"WORLD_SIZE": "two", "RANK": 0}, "two"),
        ({"WORLD_SIZE": 2, "RANK": 0}, "MASTER_ADDR"),
    ],
)
def test_an_incomplete_environment_is_one_line(tmp_path, place, words):
    process = start([*SMALL, "--out", str(tmp_path / "run")], tmp_path / "errors", **place)
    process.join()
    (line,) = (tmp_path / "errors").read_text().splitlines()
    assert process.exitcode == 2 and words in line and "start it with torchrun" in line


def test_more_processes_than_rows_of_a_batch(tmp_path):
    """Three processes share batches of two: one of them has no row."""
    small = [*SMALL, "--ctl-batch-size", "2", "--distill-batch-size", "1", "--distill-runs", "2", "--eval-runs", "2"]
    jobs = start_together([[*small, "--out", str(tmp_path / "run")]] * 3, tmp_path)
    for number, job in enumerate(jobs):
        job.join()
        assert job.exitcode == 0, (tmp_path / f"errors-{number}").read_text()
