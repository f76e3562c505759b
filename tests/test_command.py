"""Every command ends in a documented exit code, without a traceback, whatever its output does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import main
from eval.run.command import one_line_errors
from tinystories.errors import InputError, listed, printable

ROOT = Path(__file__).parents[1]
MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("a\nb\x1b[2J"), 2, r"error: a\nb\x1b[2J"),
        (KeyboardInterrupt(), 130, "interrupted"),
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


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk():
    return open("/dev/full", "w")


STREAMS = [(closed_pipe, 141, ""), (full_disk, 2, "standard output"), (lambda: None, 0, "")]


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
