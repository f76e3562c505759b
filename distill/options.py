"""Options as fields of a frozen dataclass, each with its default, a line of help and its limits.

A learner has an `Options` class beside its code; those of a job are in `eval/options.py`, which
makes the command line of all of them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


def option(
    default: Any,
    text: str,
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float = math.inf,
) -> Any:
    """A dataclass field with its default, a line of help, its choices and its limits.

    The default also tells the type of the option, or of each of its values if it is a tuple. The
    least value is 1 for whole numbers and 0 for others, unless `low` is another.
    """
    metadata = {"help": text, "choices": tuple(choices), "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


def kind_of(field: dataclasses.Field) -> type:
    """The type of an option, or of each of its values if its default is a tuple."""
    values = (*field.default, "") if isinstance(field.default, tuple) else (field.default,)
    return type(values[0])


def flag_of(name: str) -> str:
    """`--ctl-updates` of ctl_updates."""
    return "--" + name.replace("_", "-")


def check(options: Any) -> None:
    """ValueError names an option of the wrong type, not among its choices, or out of range."""
    for field in dataclasses.fields(options):
        if not field.metadata:  # no option of the command line
            continue
        kind, value = kind_of(field), getattr(options, field.name)
        low, high, choices = (field.metadata[name] for name in ("low", "high", "choices"))
        low = (1 if kind is int else 0) if low is None else low
        values = value if isinstance(field.default, tuple) else (value,)
        fault = f"{flag_of(field.name)} is {value!r}"
        if not isinstance(values, tuple) or (field.default and not values):
            raise ValueError(f"{fault}; give a list of values")
        for one in values:
            fault = f"{flag_of(field.name)} is {one!r}"
            if type(one) is not kind and not (kind is float and type(one) is int):
                raise ValueError(f"{fault}; give a value of type {kind.__name__}")
            if choices and one not in choices:
                raise ValueError(f"{fault}; give one of {', '.join(choices)}")
            if kind in (int, float) and not (low <= one <= high and one < math.inf):  # nor NaN
                limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise ValueError(f"{fault}; give a number {limits}")
