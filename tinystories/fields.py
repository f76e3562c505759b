"""The fields of a `config.json`, each checked for what it has to be before any network is built of it.

    whole     an integer of a stated range        number    a finite float above 0
    truth     true or false                       word      the one that is known

A field that is absent or null has its default. What does not fit is an InputError that names the file and the field.
"""

import reprlib
from typing import Any, NoReturn

from tinystories.errors import InputError

MOST = 10**7  # of a size: beyond, no network is meant, and nothing may ask for its memory
MOST_LAYERS = 1000
SIZE = (1, MOST)


class Fields:
    """Reads the fields of `raw`, the content of the file `source`, which describes a network of the kind `model_type`."""

    def __init__(self, raw: dict[str, Any], source: str, model_type: str):
        self.raw, self.source, self.model_type = raw, source, model_type
        self.word("model_type", model_type)

    def refuse(self, fault: str, remedy: str = "restore the file") -> NoReturn:
        """Raise the InputError."""
        raise InputError(f"{self.source}: not a {self.model_type} configuration ({fault}); {remedy}")

    def get(self, name: str, default: Any) -> Any:
        """The field, or its default."""
        value = self.raw.get(name)
        value = default if value is None else value
        return self.refuse(f"it has no {name}") if value is None else value

    def whole(self, name: str, default: int | None = None, within: tuple[int, int] = SIZE) -> int:
        """An integer from the first to the second of `within`; true and 20.0 are none."""
        value, (low, high) = self.get(name, default), within
        if type(value) is not int or not low <= value <= high:
            self.refuse(f"{name} is {reprlib.repr(value)}, not a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        """A float above 0 and at most MOST."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= MOST:
            self.refuse(f"{name} is {reprlib.repr(value)}, not a finite number above 0")
        return float(value)

    def truth(self, name: str, default: bool) -> bool:
        """True or false; 1 and "false" are neither."""
        value = self.get(name, default)
        if type(value) is not bool:
            self.refuse(f"{name} is {reprlib.repr(value)}, not true or false")
        return value

    def word(self, name: str, known: str) -> None:
        """Refuse the field where it is another word than `known`."""
        value = self.get(name, known)
        if value != known:
            self.refuse(f"{name} is {reprlib.repr(value)}, not {known}", "use another checkpoint")
