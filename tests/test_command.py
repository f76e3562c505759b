"""Every command ends in an exit code that is documented, without a traceback, whatever becomes of its output."""

import dataclasses
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from eval.run.command import one_line_errors, printable
from eval.run.options import RunConfig
from tinystories.checkpoint import write_json
from tinystories.errors import InputError, listed

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """What is needed of a finished run to print its table."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    row = {"toxicity": 0.5, "similarity": 0.4, "log_z_hat_mean": -9.0, "ess": 3.0}
    write_json(run / "config.json", dataclasses.asdict(RunConfig()))
    write_json(run / "results.json", {"base": row, "generations": [row, row]})
    return run


def shell(command: str, **variables: object) -> tuple[int, str]:
    """The exit code of the first command of a pipeline, and what it has said on standard error if that goes nowhere else."""
    environment = os.environ | {name: str(value) for name, value in variables.items()} | {"PYTHON": sys.executable}
    command += '; exit "${PIPESTATUS[0]}"'
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="how a signal ends a process is POSIX")
@pytest.mark.parametrize("library", ["torch.types", "numpy", "tokenizers"])
@pytest.mark.parametrize("program", ["main.py", "-m tsmc", "-m eval.summary", "-m eval.paper"])
def test_ctrl_c_while_libraries_load_leaves_no_traceback(program, library):
    """The interpreter says what it has imported: after some module of the library it is interrupted."""
    command = [sys.executable, "-X", "importtime", *program.split(), "--help"]
    options = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    heeded = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a job in the background inherits that it is ignored
    with subprocess.Popen(command, preexec_fn=heeded, **options) as process:
        for line in process.stderr:
            if library in line:
                process.send_signal(signal.SIGINT)
                break
        ending = process.stderr.read()
    assert "Traceback" not in ending and process.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "output", "code", "said"),
    [
        ("main.py --resume", ">/dev/full", 2, "standard output cannot be written"),
        ("main.py --resume", ">&-", 0, ""),
        ("main.py --resume", ">&- 2>&-", 0, ""),
        ("main.py --resume", "2>/dev/full", 0, ""),
        ("main.py --resume", "2>&-", 0, ""),
        ("main.py --resume", "| true", 141, ""),
        ("main.py --resume", "2>&1 | true", 141, ""),
        ("-m eval.summary", ">/dev/full", 2, "standard output cannot be written"),
        ("-m eval.summary", ">&-", 0, ""),
        ("-m eval.summary", "| true", 141, ""),
    ],
)
def test_output_that_cannot_be_written(finished, program, output, code, said):
    found, errors = shell(f'"$PYTHON" {program} "$RUN" {output}', RUN=finished)
    assert found == code and errors.count("\n") == (1 if said else 0) and said in errors


@pytest.mark.slow
@pytest.mark.parametrize("program", ["main.py --seed -1", "main.py --sed 1", "-m tsmc nowhere"])
@pytest.mark.parametrize("output", ["2>/dev/full", "2>&-", ">/dev/full 2>/dev/full"])
def test_bad_input_ends_with_its_code_where_nobody_can_be_told(program, output):
    assert shell(f'"$PYTHON" {program} {output}') == (2, "")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("a\nb\x1b[2J"), 2, r"error: a\nb\x1b[2J"),
        (KeyboardInterrupt("a\nb\x1b[2J"), 130, r"a\nb\x1b[2J"),
        (FileNotFoundError(2, "No", "\x1b[2J\nerror: x"), 2, r"error: \x1b[2J\nerror: x: cannot be used (No)"),
        (MemoryError(), 2, "error: out of memory; lower it"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            2,
            "error: out of memory; lower it",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "error: x.json: cannot be used (No such file"),
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


def test_what_is_printed_stays_in_its_line():
    assert printable("a\nb\r\x1b[31m\u202e\x85") == r"a\nb\r\x1b[31m\u202e\x85"
    assert printable("Zoë 日本 🙂") == "Zoë 日本 🙂"
    assert str(InputError("a\nb\x1b[2J")) == r"a\nb\x1b[2J", "wherever it is shown"
    assert listed(f"\n{number}" * 60 for number in range(9)).count(",") == 4 and listed("ba") == "a, b"
    assert len(listed(["x" * 10**6] * 100)) < 500
