"""Every command ends in a documented exit code, whatever its output does; options; the package."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from jobs import run_main

from eval.command import one_line_errors
from eval.options import read_config

ROOT = Path(__file__).parents[1]
MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("a\nb\x1b[2J"), 2, r"error: a\nb\x1b[2J"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError(MEMORY), 2, "error: out of memory; lower"),
        (OSError(28, "Full", "x.json"), 2, "error: x.json: cannot be used (Full); free space"),
    ],
)
def test_every_error_is_one_line(capsys, monkeypatch, error, code, words):
    with pytest.raises(SystemExit) as ended, one_line_errors("program"):
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == code and line.startswith(f"program: {words}")
    if isinstance(error, ValueError):
        monkeypatch.setenv("TSMC_TRACEBACK", "1")
        with pytest.raises(ValueError), one_line_errors("program"):
            raise error


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


FULL_DISK = partial(open, "/dev/full", "w")
STREAMS = [(closed_pipe, 141, ""), (FULL_DISK, 2, "standard output"), (lambda: None, 0, "")]


@pytest.mark.parametrize(("stream", "code", "said"), STREAMS)
def test_output_that_cannot_be_written(finished_job, monkeypatch, capsys, stream, code, said):
    run, found = finished_job("paper"), 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream())
        try:
            run_main(["--resume", run])
        except SystemExit as ended:
            found = ended.code
    errors = capsys.readouterr().err
    assert found == code and said in errors and errors.count("\n") == 1 + bool(said)


def test_defaults_are_those_of_the_learner_and_the_preset():
    lines = ["", "--preset paper", "--learner grpo", "--particles 5 --end . --end !"]
    found = [read_config(line.split(), "")[0] for line in lines]
    assert found[0].run.learner == "paper" and found[0].learner.ess_threshold == 1
    assert [found[n].learner.particles for n in (0, 3)] == [100, 5]
    assert found[1].run.lm.startswith("roneneldan/TinyStories-33M@")
    assert (found[2].run.generations, found[2].learner.strength) == (0, 0.64)
    assert (found[0].run.end, found[3].run.end) == ((), (".", "!"))


def test_a_missing_package_says_what_to_install():
    """As where the virtual environment is not active: -S hides what is installed."""
    ended = subprocess.run([sys.executable, "-S", "main.py"], cwd=ROOT, capture_output=True)
    line = ended.stderr.decode()
    assert ended.returncode == 2 and line.count("\n") == 1
    assert line.startswith("error: torch, ") and "pip install -r requirements.txt" in line


def test_the_wheel_serves_beside_another_eval(tmp_path):
    """The user's own eval.py stays what `import eval` finds."""
    pytest.importorskip("setuptools", minversion="77")
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("tinystories", "tsmc", "twist", "distill"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "install", str(source), "--no-deps", "-q"]
    subprocess.run([*build, "--no-build-isolation", "-t", str(site)], check=True)
    (tmp_path / "eval.py").write_text("OWN = 'own'")
    own = "import distill, eval, tinystories, tsmc, twist; print(eval.OWN, distill.__file__)"
    command, place = [sys.executable, "-c", own], {"PYTHONPATH": str(site)}
    ended = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True)
    assert ended.stdout == f"own {site}/distill/__init__.py\n"
