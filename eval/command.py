"""How every command ends: what the user can correct is one line on standard error.

0    done                    130   Ctrl-C
2    bad input, no memory, no space
141  the reader of standard output has closed it

All of this program raises ValueError("what is wrong; remedy") for what a user has typed or given,
and nothing catches it but `one_line_errors`. TSMC_TRACEBACK=1 shows where it comes from.
"""

import argparse
import contextlib
import ctypes
import difflib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from tsmc import processes
from twist.guards import lacks_memory


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """ValueError, which ends the program in one line, with the nearest name of an option."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        name = unknown.partition(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{message}; {meant}--help shows all options")


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """End the program in one line that opens with its name."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        # Keep freed pages: to wait for fresh zeroed ones is a third of the time of a training step.
        library.mallopt(-4, 0)  # M_MMAP_MAX of <malloc.h>
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (the caller has closed it)
    line, code = "", 0
    try:
        with results_alone():
            yield
            print(end="", flush=True)
    except KeyboardInterrupt as interruption:
        line, code = str(interruption) or "interrupted", 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python flushes it at its end)
        code = 141
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        told = str(error)
        is_ours = isinstance(error, RuntimeError) and not lacks_memory(error)
        if is_ours or os.environ.get("TSMC_TRACEBACK"):
            raise
        if isinstance(error, OSError):
            told = f"{error.filename or 'standard output'}: cannot be used ({error.strerror})"
            told += "; free space there, or choose another place"
        elif not isinstance(error, ValueError):
            told = "out of memory; lower the numbers of particles or the batch sizes"
        line, code = f"error: {told}", 2
    finally:
        processes.leave()
    if line:
        with contextlib.suppress(OSError):
            print(printable(f"{program}: {line}"), file=sys.stderr, flush=True)
    if code:
        sys.exit(code)


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
    """Standard output is for what Python prints; what else is written there joins the errors.

    As by a library or a child process. A stream in place of sys.stdout is left as it is.
    """
    plain, is_own = sys.stdout, False
    with contextlib.suppress(AttributeError, OSError):  # where it is closed, or no file
        is_own = plain.fileno() == 1
    if is_own:
        plain.flush()
        results = open(os.dup(1), "w", 1, plain.encoding, "backslashreplace")  # noqa: SIM115
        os.dup2(2, 1)
        sys.stdout = results
    try:
        yield
    finally:
        if is_own:
            os.dup2(results.fileno(), 1)
            with contextlib.suppress(OSError):  # which has been told
                results.close()
            sys.stdout = plain


def printable(text: str) -> str:
    """The text in one line, line breaks and control characters escaped as Python does it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(line: str) -> None:
    """Print a line on standard error, in process 0; that nobody reads it does not end a job."""
    if processes.rank() == 0:
        with contextlib.suppress(OSError):
            print(printable(line), file=sys.stderr, flush=True)
