"""What the tests share: one small finished run."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist keeps the other cores busy

# isort: split
import filelock
import pytest

from main import main

SMALL = [
    *("--generations", "1", "--particles", "10", "--ctl-updates", "3", "--ctl-batch-size", "20"),
    *("--distill-runs", "4", "--distill-updates", "3", "--distill-batch-size", "8"),
    *("--eval-runs", "3", "--eval-particles", "6", "--eval-base-samples", "40", "--quiet"),
]
"""Options of a run of main.py that takes a few seconds."""


@pytest.fixture(scope="session")
def made_once(tmp_path_factory, worker_id) -> Callable[[str, Callable[[Path], None]], Path]:
    """made_once(name, make): a directory that make(directory) has filled in one of the workers."""
    root = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        root = root.parent  # shared by the workers

    def directory(name: str, make: Callable[[Path], None]) -> Path:
        with filelock.FileLock(root / f"{name}.lock"):
            if not (root / name / "results.json").exists():
                make(root / name)
        return root / name

    return directory


@pytest.fixture(scope="session")
def finished_run(made_once) -> Path:
    """The directory of a small finished run, made once for all workers; do not change it."""
    return made_once("finished-run", lambda run: main([*SMALL, "--out", str(run)]))
