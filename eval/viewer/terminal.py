"""Text on a terminal or in a pipe: what a model wrote cannot move the cursor, and columns stay columns."""

import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterator

from tinystories.errors import InputError


def printable(text: str) -> str:
    """The text in one line: line breaks, control characters and the like as Python would escape them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def columns(text: str) -> int:
    """How many columns a terminal needs: two for wide characters, none for combining marks."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def tail(text: str, width: int) -> str:
    """The end of a text in at most `width` columns, with an ellipsis for what was left out."""
    if columns(text) <= width:
        return text
    used, start = 1, len(text)
    while start > 0 and used + columns(text[start - 1]) <= width:
        start -= 1
        used += columns(text[start])
    return "…" + text[start:]


def is_screen() -> bool:
    """Whether standard output is a terminal that can be cleared and coloured."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Whoever stops reading or presses Ctrl-C ends the program without a word, with the exit codes 141 and 130 of the shell.

    Characters that the encoding lacks are escaped; InputError where standard output cannot be written.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.filename is not None:
            raise InputError(f"{error.filename}: cannot be used ({error.strerror}); check the name") from error
        with contextlib.suppress(OSError, ValueError):  # what is still in the buffer has nowhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        raise InputError(f"standard output cannot be written ({error.strerror}); free space there") from error
