"""How every command ends: an error that the user can correct is one line on standard error.

0    done                    130   Ctrl-C
2    bad input, no memory, no space, a lost process of the same job
141  the reader of standard output has stopped
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from eval.run import processes
from tinystories.errors import InputError, printable


@contextlib.contextmanager
def one_line_errors(program: str, out_of_memory: str = "ask for less at a time") -> Iterator[None]:
    """End the program in one line that opens with its name; `out_of_memory` is the remedy then.

    Characters that the encoding of standard output lacks are escaped.
    """
    signal.signal(signal.SIGINT, interrupt_once)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (the caller has closed it)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except InputError as error:
        stop(program, f"error: {error}", 2)
    except KeyboardInterrupt as interruption:
        stop(program, str(interruption) or "interrupted", 130)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python flushes it at its end)
        sys.exit(141)
    except OSError as error:
        fault = f"error: {error.filename or 'standard output'}: cannot be used ({error.strerror})"
        stop(program, f"{fault}; free space there or choose another place", 2)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "memory" in str(error).lower():
            stop(program, f"error: out of memory; {out_of_memory}", 2)
        if not processes.is_lost(error):
            raise
        fault = "error: another process of this job has ended; see its message"
        stop(program, f"{fault}, then continue with --resume", 2)
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
    """Print one line on standard error; a closed standard error does not end a run."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(printable(line), file=sys.stderr, flush=True)
