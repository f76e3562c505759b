"""InputError, for everything that a user can correct: a file, an option, a weight.

It may quote names from somebody else's file or server: these are shortened and escaped.
"""

import traceback
from collections.abc import Iterable

LONGEST = 100  # characters of a name or a value in a message
MANY = 4  # names of a list in a message


class InputError(ValueError):
    """Bad input; one line that names the file or option and the remedy. Commands exit with 2."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text in one line, line breaks and control characters escaped as Python does it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(text: str) -> str:
    """The text, cut off after LONGEST characters."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def reason_of(error: BaseException) -> str:
    """Type and message of an error in at most 300 characters, even where its `__str__` fails."""
    return traceback.format_exception_only(error)[-1].split("\n")[0][:300]


def listed(names: Iterable[str]) -> str:
    """The names in alphabetical order; of a long list, the first ones and the number of others."""
    names = sorted(names)
    text = ", ".join(shortened(name) for name in names[:MANY])
    return text if len(names) <= MANY else f"{text}, and {len(names) - MANY} more"
