"""Every command ends in a documented exit code, without a traceback, whatever its output does."""

import dataclasses
import os
import re
import sys
from functools import partial

import pytest

import main
from distill.learner import flag_of
from eval.command import one_line_errors
from eval.config import LEARNERS, RunOptions, make_parser, read_config
from tinystories.errors import InputError

MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("a\nb\x1b[2J"), 2, r"error: a\nb\x1b[2J"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError(MEMORY), 2, "error: out of memory; lower it"),
        (OSError(28, "Full", "x.json"), 2, "error: x.json: cannot be used (Full); free space"),
    ],
)
def test_every_error_is_one_line(capsys, error, code, words):
    with pytest.raises(SystemExit) as ended, one_line_errors("program", "lower it"):
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == code and line.startswith(f"program: {words}")


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


FULL_DISK = partial(open, "/dev/full", "w")
STREAMS = [(closed_pipe, 141, ""), (FULL_DISK, 2, "standard output"), (lambda: None, 0, "")]


@pytest.mark.parametrize(("stream", "code", "said"), STREAMS)
def test_output_that_cannot_be_written(finished_run, monkeypatch, capsys, stream, code, said):
    found = 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream())
        try:
            main.main(["--resume", str(finished_run)])
        except SystemExit as ended:
            found = ended.code
    errors = capsys.readouterr().err
    assert found == code and said in errors and errors.count("\n") == 1 + bool(said)


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_help_names_every_option(learner, monkeypatch):
    """A run has at most 20 options, --resume among them, and a learner at most 12."""
    monkeypatch.setenv("COLUMNS", "100")
    text = make_parser("All about it.", learner).format_help()
    shown = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    own = [field.name for field in dataclasses.fields(LEARNERS[learner][1])]
    of_run = [field.name for field in dataclasses.fields(RunOptions)]
    assert shown == ["--resume", *map(flag_of, of_run + own)]
    assert len(of_run) < 20 and len(own) <= 12


REFUSED = {
    "--generation 5": "did you mean --generations?",
    "--preset pockets": "--preset is 'pockets'; give one of pocket, paper",
    "--learner magic": "--learner is 'magic'; give one of paper, weighted, pooled, dpo, grpo",
    "--pool-draws 5": "unrecognized arguments: --pool-draws",
    "--learner pooled --ctl-updates 5": "unrecognized arguments: --ctl-updates",
    "--learner pooled --pool-draws 0": "--pool-draws is 0; give at least 1",
    "--ctl-updates 0": "--ctl-updates is 0; give at least 1",
    "--eval-particles 0": "--eval-particles is 0; give at least 1",
    "--beta nan": "--beta is nan; give at least 0",
}


@pytest.mark.parametrize(("line", "words"), REFUSED.items())
def test_an_option_that_does_not_fit_is_refused(capsys, line, words):
    with pytest.raises(SystemExit), one_line_errors("main.py"):
        read_config(line.split(), "")
    assert words in capsys.readouterr().err


def test_defaults_are_those_of_the_learner_and_the_preset():
    lines = ["--learner paper", "", "--preset paper", "--learner grpo", "--particles 5"]
    found = [read_config(line.split(), "")[0] for line in lines]
    assert [config.learner.particles for config in (*found[:3], found[4])] == [100, 50, 100, 5]
    assert found[0].learner.ess_threshold == 1 and found[1].learner.ess_threshold == 0
    assert found[2].run.lm.startswith("roneneldan/TinyStories-33M@")
    assert (found[3].run.generations, found[3].learner.strength) == (0, 0.64)
