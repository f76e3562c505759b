"""What the tests share: small finished jobs, and one thread for each process."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # pytest-xdist keeps the other cores busy, and jobs.py forks

# isort: split
import filelock
import pytest
from jobs import JOBS, run_main


def scope(config: pytest.Config, **_: object) -> str:  # jobs are made once, or for each shift
    return "function" if config.pluginmanager.has_plugin("tests.margins") else "session"


@pytest.fixture(scope=scope)
def finished_job(request, tmp_path_factory) -> Callable[[str], Path]:
    """finished_job(learner): a finished job of JOBS, shared by all processes; do not change it."""
    root = tmp_path_factory.mktemp("jobs")
    if request.scope == "session" and "PYTEST_XDIST_WORKER" in os.environ:
        root = tmp_path_factory.getbasetemp().parent

    def job(name: str) -> Path:
        with filelock.FileLock(root / f"{name}.lock"):
            if not (root / name).exists():
                run_main([*JOBS[name], "--out", root / name])
        return root / name

    return job
