"""How every command ends: an error that the user can correct is one line on standard error.

0    done                    130   Ctrl-C
2    bad input, no memory, no space
141  the reader of standard output has stopped
"""

import argparse
import contextlib
import ctypes
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from tinystories.errors import InputError, printable
from tsmc import processes


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        stop(self.prog, f"error: {message}; see {self.prog} --help", 2)


@contextlib.contextmanager
def one_line_errors(program: str, out_of_memory: str = "ask for less at a time") -> Iterator[None]:
    """End the program in one line that opens with its name; `out_of_memory` is the remedy then."""
    signal.signal(signal.SIGINT, interrupt_once)
    keep_freed_memory()
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (the caller has closed it)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # where its encoding lacks characters
    try:
        yield
        print(end="", flush=True)
    except InputError as error:
        stop(program, f"error: {error}", 2)
    except KeyboardInterrupt as interruption:
        stop(program, str(interruption) or "interrupted", 130)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python flushes it at its end)
        sys.exit(141)
    except OSError as error:
        fault = f"error: {error.filename or 'standard output'}: cannot be used ({error.strerror})"
        remedy = "free space there" if error.errno == errno.ENOSPC else "choose another place"
        stop(program, f"{fault}; {remedy}", 2)
    except (MemoryError, RuntimeError) as error:
        told = str(error).lower()  # oneDNN says of memory only that it has no primitive
        if isinstance(error, RuntimeError) and not re.search("memory|create a primitive", told):
            raise
        stop(program, f"error: out of memory; {out_of_memory}", 2)
    finally:
        processes.leave()


def interrupt_once(number: int, frame: object) -> NoReturn:
    """Ctrl-C ends the program; pressed again while it ends, it is ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def stop(program: str, message: str, code: int) -> NoReturn:
    """Print one line on standard error and exit."""
    say(f"{program}: {message}")
    sys.exit(code)


def say(line: str) -> None:
    """Print one line on standard error; that nobody reads it does not end a run."""
    with contextlib.suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)


def keep_freed_memory() -> None:
    """Let glibc's malloc, if that is in use, keep the pages of freed tensors.

    Waiting for fresh zeroed pages takes about a third of the time of a training step.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):
            library.mallopt(-4, 0)  # M_MMAP_MAX of <malloc.h>
            library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
