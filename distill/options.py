"""Options as dataclass fields, each with a line of help, the range of its values and any choices.

The learners keep their options beside their code; `eval/run/options.py` makes the command line.
"""

import dataclasses
from typing import Any

from tinystories.errors import InputError, shortened

MOST = 10**9  # larger numbers are mistakes


def option(default: Any, text: str, low: Any = -MOST, high: Any = MOST, choices: Any = ()) -> Any:
    """A dataclass field with its default, help, limits and choices."""
    limits = {"low": low, "high": high, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata={"help": text, "limits": limits})


def check(flag: str, value: Any, low: Any = -MOST, high: Any = MOST, choices: Any = ()) -> None:
    """InputError where an option's value is out of its range."""
    if choices and value not in choices:
        raise InputError(f"{flag} is {value!r}; give one of {', '.join(choices)}")
    if isinstance(value, str):
        if not value.isprintable():
            raise InputError(f"{flag} holds characters that cannot be printed; give plain text")
    elif not low <= value <= high:
        limits = f"at least {low}" if value < low else f"at most {high}"
        raise InputError(f"{flag} is {shortened(str(value))}; give {limits}")


def check_all(options: Any) -> None:
    """InputError where a number or a choice of the options, a dataclass, is out of its range."""
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if not isinstance(value, tuple):
            check(item.name, value, **item.metadata["limits"])
