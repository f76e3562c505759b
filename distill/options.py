"""Options as dataclass fields, each with a line of help, the range of its values and any choices.

The learners keep their options beside their code; `eval/run/options.py` makes the command line.
"""

import dataclasses
from collections.abc import Callable
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


def check_all(options: Any, named: Callable[[str], str] = str) -> None:
    """InputError, with the field as it is `named`, where a value of a dataclass is out of range."""
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        for part in value if isinstance(value, tuple) else [value]:
            check(named(item.name), part, **item.metadata["limits"])
