"""How every command here ends: whatever a user can put right is one line on standard error, and an exit code.

0    done                    130   Ctrl-C
2    bad input, no memory, no space, another process of the job has ended
141  whoever read standard output has stopped

Standard error that is closed, full or no longer read changes none of them; a standard output that is closed is not wanted.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO

from eval.run import processes
from tinystories.errors import InputError, printable
from tinystories.interrupts import have_loaded


@contextlib.contextmanager
def one_line_errors(program: str, out_of_memory: str = "ask for less at a time") -> Iterator[None]:
    """End the program in one line that opens with its name; `out_of_memory` says what to do then.

    Characters that the encoding of standard output lacks are escaped.
    """
    have_loaded()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except InputError as error:
        stop(program, f"error: {error}", 2)
    except KeyboardInterrupt as interruption:
        stop(program, str(interruption) or "interrupted", 130)
    except OSError as error:
        if error.filename is not None:
            stop(program, f"error: {error.filename}: cannot be used ({error.strerror}); check the name", 2)
        silence(sys.stdout)
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        stop(program, f"error: standard output cannot be written ({error.strerror}); free space there", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "memory" in str(error).lower():
            stop(program, f"error: out of memory; {out_of_memory}", 2)
        if not processes.is_lost(error):
            raise
        stop(program, "error: another process of this job has ended; see its message, then continue with --resume", 2)


def stop(program: str, message: str, code: int) -> NoReturn:
    """One line on standard error, and the end."""
    say(f"{program}: {message}")
    if processes.count() > 1:
        os._exit(code)  # an orderly end would wait for the other processes
    sys.exit(code)


def say(line: str) -> None:
    """One line on standard error, for those who read it: a run does not end because nobody does."""
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Send a standard stream to nowhere, with what is still in its buffer."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
