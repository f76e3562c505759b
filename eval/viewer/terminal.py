"""Text on a terminal or in a pipe: what a model wrote cannot move the cursor, and columns stay columns."""

import os
import sys
import unicodedata


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
