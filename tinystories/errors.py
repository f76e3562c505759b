"""One exception for everything a user can put right: a file, an option, a weight; and text that is safe to print.

What is named in an error may come from a stranger's file or server. It is escaped and cut here, once for every message.
"""

from collections.abc import Iterable

LONGEST = 100  # characters of a name or a value in a message
MANY = 4  # names of a list in a message


class InputError(ValueError):
    """Bad input. The message is one line that names the file or option and the remedy; `main.py` exits with code 2."""

    def __init__(self, message: str):
        """Of the message, line breaks and control characters are escaped."""
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text in one line: line breaks, control characters and the like as Python would escape them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened(text: str) -> str:
    """The text, cut where it is long."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def listed(names: Iterable[str]) -> str:
    """The names in alphabetical order; of a long list the first ones and how many more there are."""
    names = sorted(names)
    more = [f"and {len(names) - MANY} more"] if len(names) > MANY else []
    return ", ".join([*map(shortened, names[:MANY]), *more])
