"""Options as dataclass fields, each with a line of help, the range of its values and any choices.

The learners keep their options beside their code; `eval/run/options.py` makes the command line.
"""

from dataclasses import field
from typing import Any

MOST = 10**9  # larger numbers are mistakes


def option(default: Any, text: str, low: Any = -MOST, high: Any = MOST, choices: Any = ()) -> Any:
    """A dataclass field with its default, help, limits and choices."""
    limits = {"low": low, "high": high, "choices": tuple(choices)}
    return field(default=default, metadata={"help": text, "limits": limits})
