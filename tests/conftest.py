"""What the tests share: small finished runs."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # pytest-xdist keeps the other cores busy, and jobs.py forks

# isort: split
import dataclasses

import filelock
import pytest
from jobs import JOBS, run_main

from eval.config import RunOptions
from eval.world import SHIPPED, identity, load_target, save_target, sigma_key
from main import main

SMALL = "--generations 1 --particles 10 --ctl-updates 3 --ctl-batch-size 20 --distill-runs 4"
SMALL += " --distill-updates 3 --eval-runs 3 --eval-particles 6 3"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """made_once(name, make): a directory that make(directory) has filled in one of the workers."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # shared by the workers

    def directory(name: str, make: Callable[[Path], None]) -> Path:
        with filelock.FileLock(root / f"{name}.lock"):
            if not (root / name / "results.json").exists():
                make(root / name)
        return root / name

    return directory


@pytest.fixture(scope="session")
def finished_run(made_once) -> Path:
    """A small finished run with its figures; do not change it.

    Beside it lies its target: 60 of the exact samples that come with the repository.
    """

    def make(run: Path) -> None:
        key = sigma_key(RunOptions(), identity(RunOptions()))
        exact = load_target(SHIPPED, key)
        cut = dataclasses.replace(exact, tokens=exact.tokens[:60], log_phi=exact.log_phi[:60])
        sixty = run.with_name("sixty")
        save_target(sixty, cut, key)
        main([*SMALL.split(), "--target", str(sixty), "--out", str(run)])

    return made_once("finished-run", make)


@pytest.fixture(scope="session")
def finished_job(made_once) -> Callable[[str], Path]:
    """finished_job(learner): a finished run of JOBS; do not change it."""
    return lambda name: made_once(name, lambda run: run_main([*JOBS[name], "--out", run]))
