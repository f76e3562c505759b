"""What the tests share: small finished runs."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # pytest-xdist keeps the other cores busy, and jobs.py forks

# isort: split
import filelock
import pytest
from jobs import JOBS, run_main

import tinystories
from eval.options import POCKET
from eval.world import SAMPLES, SHIPPED
from main import main
from tinystories.files import read_metadata, read_tensors, write_tensors

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
        sixty = run.with_name("sixty")
        tensors = {name: rows[:60] for name, rows in read_tensors(SHIPPED / SAMPLES).items()}
        write_tensors(sixty / SAMPLES, tensors, **read_metadata(SHIPPED / SAMPLES))
        main([*SMALL.split(), "--target", str(sixty), "--out", str(run)])

    return made_once("finished-run", make)


@pytest.fixture(scope="session")
def changed_lm(tmp_path_factory) -> Path:
    """The language model of the preset, with one of its layers changed a little."""
    path = tmp_path_factory.mktemp("changed")
    network, tokenizer = tinystories.load(POCKET / "lm")
    network.transformer.ln_f.weight.data *= 1.05
    tinystories.save(path, network, tokenizer)
    return path


@pytest.fixture(scope="session")
def finished_job(made_once) -> Callable[[str], Path]:
    """finished_job(learner): a finished run of JOBS; do not change it."""
    return lambda name: made_once(name, lambda run: run_main([*JOBS[name], "--out", run]))
