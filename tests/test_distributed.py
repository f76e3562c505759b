"""Two processes share one run: they compute what one computes, and the loss of one ends the other."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
SIZES = [
    *("--generations", "1", "--eval-runs", "5", "--eval-particles", "4", "--eval-base-samples", "25", "--rows", "12"),
    *("--length", "6", "--eval-target-proposals", "100", "--beta", "0.3"),
]
SMALL = [
    *("--method", "distilled", *SIZES, "--ctl-updates", "4", "--ctl-batch-size", "11", "--particles", "6"),
    *("--distill-runs", "7", "--distill-updates", "3", "--distill-batch-size", "9"),
]
POOLED = [
    *("--method", "pooled", *SIZES, "--pool-rounds", "1", "--pool-updates", "4", "--pool-batch-size", "7"),
    *("--pool-base-draws", "50", "--pool-draws", "30"),
]
STEPS = {"distilled": 2 * 4 + 3 + 1, "pooled": 3 * 4}  # of both generations


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(
    arguments: list[str], rank: int = 0, world: int = 1, port: int = 0, program: Sequence[str] = ("main.py",)
) -> subprocess.Popen:
    """The main job, or another program, as process `rank` of `world`, as torchrun starts it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module", params=[SMALL, POOLED], ids=["distilled", "pooled"])
def runs(request, tmp_path_factory) -> tuple[Path, Path]:
    """The same run by one process and by two."""
    place, port = tmp_path_factory.mktemp("runs"), free_port()
    jobs = [start([*request.param, "--out", str(place / "two")], rank, 2, port) for rank in range(2)]
    jobs.append(start([*request.param, "--out", str(place / "one")]))
    for job in jobs:
        assert job.wait() == 0, job.stderr.read()
    return place / "one", place / "two"


def test_two_processes_make_the_same_samples(runs):
    one, two = ((run / "samples.jsonl").read_text().splitlines() for run in runs)
    assert len(one) == len(two)
    for ours, theirs in zip(map(json.loads, one), map(json.loads, two), strict=True):
        assert ours.pop("toxicity") == pytest.approx(theirs.pop("toxicity"), rel=1e-4)
        assert ours == theirs


def test_two_processes_report_the_same_figures(runs):
    one, two = ((run / "metrics.jsonl").read_text().splitlines() for run in runs)
    kept = ("twist learning", "distillation")
    ours, theirs = ([r for r in map(json.loads, lines) if r["phase"].startswith(kept)] for lines in (one, two))
    assert len(ours) == len(theirs) in STEPS.values()
    for a, b in zip(ours, theirs, strict=True):
        assert a.pop("phase") == b.pop("phase")
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    results = [json.loads((run / "results.json").read_text())["generations"] for run in runs]
    for a, b in zip(*results, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_two_processes_learn_the_same_weights(runs):
    for name in ("model.safetensors", "twist.safetensors"):
        one, two = (load_file(run / "generation-1" / name) for run in runs)
        for key in one:
            torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-4)


LEAVES = """
import os, torch
from eval.run import processes
processes.join(torch.device("cpu"))
layer = torch.nn.Linear(2, 2)
processes.share_gradients(layer)
optimizer = torch.optim.Adam(layer.parameters())
layer(torch.ones(2)).sum().backward()
optimizer.step()
processes.gather(1)
processes.leave()
print([name for task in os.listdir("/proc/self/task") if "gloo" in (name := open(f"/proc/self/task/{task}/comm").read())])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the names of a process's threads")
def test_a_process_that_leaves_keeps_no_thread_that_could_abort_its_end():
    port = free_port()
    jobs = [start([], rank, 2, port, ("-c", LEAVES)) for rank in range(2)]
    assert [(job.communicate()[0], job.returncode) for job in jobs] == [("[]\n", 0)] * 2


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs a signal that stops a process")
def test_ctrl_c_reaches_a_process_that_waits_for_another(tmp_path):
    port = free_port()
    jobs = [
        start([*SMALL, "--ctl-updates", "100000", "--out", str(tmp_path / "run")], rank, 2, port) for rank in range(2)
    ]
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size > 0):
        assert all(job.poll() is None for job in jobs), [job.stderr.read() for job in jobs if job.poll() is not None]
    jobs[1].send_signal(signal.SIGSTOP)
    time.sleep(1)
    for _ in range(60):  # twice is enough where both are heeded; on a busy machine two may arrive as one
        if jobs[0].poll() is None:
            jobs[0].send_signal(signal.SIGINT)
            time.sleep(0.5)
    try:
        assert jobs[0].wait(1) == 130
        assert "continue from the last saved state" in jobs[0].stderr.read()
    finally:
        jobs[1].kill()


def test_the_loss_of_one_process_ends_the_other_with_one_line(tmp_path):
    port = free_port()
    arguments = [*SMALL, "--ctl-updates", "100000", "--out", str(tmp_path / "run")]
    jobs = [start(arguments, rank, 2, port) for rank in range(2)]
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size > 0):
        assert all(job.poll() is None for job in jobs), [job.stderr.read() for job in jobs if job.poll() is not None]
    jobs[1].kill()
    _, errors = jobs[0].communicate(timeout=60)
    assert jobs[0].returncode == 2
    assert "another process of this job has ended" in errors.strip().splitlines()[-1]
