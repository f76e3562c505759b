"""Every command ends in a documented exit code, without a traceback, whatever its output does."""

import os
import re
import sys
from functools import partial

import pytest

import main
from eval.run.command import one_line_errors
from eval.run.options import GROUPS, declared, flag_of, make_parser, read_config
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
    assert found == code and said in errors and errors.count("\n") == bool(said)


def test_the_help_names_every_option_on_two_screens(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = make_parser("All about it.").format_help()
    shown = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    options = [flag_of(item.name) for kind in GROUPS.values() for item in declared(kind)]
    assert shown == ["--resume", *options] and text.count("\n") < 100


REFUSED = {
    "--particels 5": "did you mean --particles?",
    "--beta=--": "--beta is []",
    "--preset pockets": "--preset is 'pockets'; give one of pocket, paper",
    "--pool-draws 5": "--pool-draws has no effect without --learner pooled",
    "--no-surrogate": "--no-surrogate has no effect without --learner pooled",
    "--learner pooled --ctl-updates 5": "--ctl-updates has no effect without --learner published",
    "--as-published --ess-threshold 0.5": "--as-published sets --ess-threshold itself",
    "--as-published --learner pooled": "--as-published sets --learner itself",
    "--beta 5 --potential regex:a": "--beta has no effect without --potential toxicity",
}


@pytest.mark.parametrize(("line", "words"), REFUSED.items())
def test_an_option_that_would_not_count_is_refused(monkeypatch, capsys, line, words):
    monkeypatch.setattr(sys, "argv", ["main.py", *line.split()])
    with pytest.raises(SystemExit), one_line_errors("main.py"):
        read_config(None, "")
    assert words in capsys.readouterr().err


def test_what_presets_set_and_what_counts_is_accepted(monkeypatch):
    lines = ["", "--preset paper", "--as-published --particles 5", "--ctl-updates 5"]
    lines += ["--learner pooled --pool-draws 5 --ess-threshold 0.5 --no-surrogate"]
    for line in lines:
        monkeypatch.setattr(sys, "argv", ["main.py", *line.split()])
        read_config(None, "")
    read_config(["--pool-draws", "5"], "")  # a program's own
    found = [read_config(line.split(), "")[0].particles for line in lines[:3]]
    assert found == [50, 100, 5]
