"""Every command ends in a documented exit code, without a traceback, whatever its output does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import main
from eval.run.command import one_line_errors, say
from tinystories.errors import InputError, listed, printable

ROOT = Path(__file__).parents[1]
MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("a\nb\x1b[2J"), 2, r"error: a\nb\x1b[2J"),
        (KeyboardInterrupt("a\nb\x1b[2J"), 130, r"a\nb\x1b[2J"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "error: out of memory; lower it"),
        (RuntimeError(MEMORY), 2, "error: out of memory; lower it"),
        (OSError(28, "Full", "x.json"), 2, "error: x.json: cannot be used (Full); free space"),
        (OSError(28, "Full"), 2, "error: standard output: cannot be used (Full); free space"),
    ],
)
def test_every_error_is_one_line(capsys, error, code, words):
    with pytest.raises(SystemExit) as ended, one_line_errors("program", "lower it"):
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == code and line.startswith(f"program: {words}")


def test_a_mistake_in_the_program_is_not_hidden():
    with pytest.raises(RuntimeError, match="a mistake"), one_line_errors("program"):
        raise RuntimeError("a mistake")


def closed_pipe():
    """A stream whose reader has stopped."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


@pytest.mark.parametrize(
    ("stream", "code"),
    [(closed_pipe, 141), (lambda: open("/dev/full", "w"), 2), (lambda: None, None)],
    ids=["closed pipe", "full disk", "no output"],
)
def test_output_that_cannot_be_written(finished_run, monkeypatch, capsys, stream, code):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream())
        if code is None:
            main.main(["--resume", str(finished_run)])
        else:
            with pytest.raises(SystemExit) as ended:
                main.main(["--resume", str(finished_run)])
            assert ended.value.code == code
    assert capsys.readouterr().err.count("\n") == (1 if code == 2 else 0)


@pytest.mark.parametrize("stream", [closed_pipe, lambda: open("/dev/full", "w"), lambda: None])
def test_bad_input_ends_with_its_code_where_nobody_can_be_told(monkeypatch, stream):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream())
        say("unheard")
        for arguments in (["--seed", "-1"], ["--sed", "1"]):
            with pytest.raises(SystemExit) as ended:
                main.main(arguments)
            assert ended.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch.types", "numpy", "tokenizers"])
def test_ctrl_c_while_libraries_load_leaves_no_traceback(library):
    """The interpreter says what it imports: after some module of the library it is interrupted."""
    command = [sys.executable, "-X", "importtime", "main.py", "--help"]
    options = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:
        for line in process.stderr:
            if library in line:
                process.send_signal(signal.SIGINT)
                break
        ending = process.stderr.read()
    assert "Traceback" not in ending and process.returncode == -signal.SIGINT


def test_what_is_printed_stays_in_its_line():
    assert printable("a\nb\r\x1b[31m\u202e\x85") == r"a\nb\r\x1b[31m\u202e\x85"
    assert printable("Zoë 日本 🙂") == "Zoë 日本 🙂"
    assert listed(f"\n{number}" * 60 for number in range(9)).count(",") == 4
    assert listed("ba") == "a, b" and len(listed(["x" * 10**6] * 100)) < 500
