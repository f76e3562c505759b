"""Factors of a potential by name, as `--potential` gives them, and those that are ready to use.

A ready factor has log phi [N] at most 0 for N texts:

    power             log phi = beta log score(text)
    keyword, regex    log phi = 0 where the continuation holds the word or pattern, else -strength
    without           log phi = 0 where the continuation does not hold the word, else -strength
    ended             log phi = 0 where a token `end` has finished the text, else -strength

At strength infinity, the default, a factor is hard: a text that misses has phi = 0. All but `power`
read the continuation alone, whose two ends count as ends of words, even where its last token leaves
a word unfinished. `without` has a prefix part log f_t (`tsmc/sampler.py`), the part of log phi that
no continuation can change: there only finished words count.
"""

import contextlib
import difflib
import functools
import inspect
import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from twist.guards import call_users

CLASSIFIED = ("toxicity", "nontoxicity")
FORMS = "toxicity, nontoxicity, ended, keyword:WORD, regex:PATTERN, without:WORD or FILE.py:NAME"


def power(log_score: Callable[[list[str]], Tensor], beta: float) -> Callable[[list[str]], Tensor]:
    """phi = score^beta of whole texts; the score is above zero."""
    return lambda texts: beta * log_score(texts).double()


def search(pattern: str, if_found: float, if_not: float) -> Any:
    """A factor of continuations: one number where the pattern is found, another where it is not."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        fault = f"{pattern!r} is not a regular expression ({error})"
        raise ValueError(f"{fault}; see Python's module re") from error

    def factor(texts: list[str]) -> list[float]:
        return [if_found if compiled.search(text) else if_not for text in texts]

    factor.reads = "continuations"
    return factor


def beginning(word: str) -> str:
    """A pattern that finds a word where it begins; ValueError where it is blank."""
    if not word.strip():
        raise ValueError("a word is blank; give one")
    return rf"(?i)(?<!\w){re.escape(word)}"


def regex(pattern: str, strength: float = math.inf) -> Any:
    """The continuation matches a Python regular expression; ValueError where it is invalid."""
    return search(pattern, 0.0, -strength)


def keyword(word: str, strength: float = math.inf) -> Any:
    """The continuation holds the word (or words) as a whole, in capitals or not."""
    factor = search(rf"{beginning(word)}(?!\w)", 0.0, -strength)
    factor.hints = [word]
    return factor


def without(word: str, strength: float = math.inf) -> Any:
    """The continuation does not hold the word as a whole, in capitals or not."""
    factor = search(rf"{beginning(word)}(?!\w)", -strength, 0.0)
    # Where something follows, the word is finished.
    factor.prefix = search(rf"{beginning(word)}(?=\W)", -strength, 0.0)
    return factor


def ended(strength: float = math.inf) -> Any:
    """The text is finished within its T tokens."""

    def factor(pairs: list[tuple[str, bool]]) -> list[float]:
        return [0.0 if is_finished else -strength for _, is_finished in pairs]

    factor.reads = "finished"
    return factor


READY = {"keyword": keyword, "regex": regex, "without": without}
"""Functions (argument, strength) -> factor by name; `ended` takes no argument."""
NAMES = (*CLASSIFIED, "ended", *READY)


def load_factors(potential: tuple[str, ...]) -> dict[str, Callable[[list], Any]]:
    """The factors that --potential names, by what it says, but for those of the classifier.

    Everything after the first colon belongs to a pattern. ValueError if one is not understood.
    """
    factors: dict[str, Any] = {}
    for spec in potential:
        flag, (head, _, argument) = f"--potential {spec}", spec.partition(":")
        name, tilde, number = head.partition("~")
        if spec in CLASSIFIED:
            continue
        if ".py" in spec and name not in READY:
            factors[spec] = users_factor(flag, spec)
        else:
            try:
                if name not in NAMES:
                    near = difflib.get_close_matches(name, NAMES, 1)
                    meant = f" (did you mean {near[0]!r}?)" if near else ""
                    raise ValueError(f"there is no {name!r}{meant}")
                strength = float(number) if tilde else math.inf
                has_word = bool(argument if name == "regex" else argument.strip())
                if not strength > 0 or (name in READY) != has_word or name in CLASSIFIED:
                    raise ValueError("a word is missing or too many, or the strength after ~")
                factors[spec] = READY[name](argument, strength) if has_word else ended(strength)
            except ValueError as error:
                raise ValueError(f"{flag}: {error}; give {FORMS}") from error
        with contextlib.suppress(AttributeError):  # which methods do not take
            factors[spec].name = flag  # in messages
    return factors


def users_factor(flag: str, spec: str) -> Any:
    """The function of FILE.py:NAME, which finds modules that lie beside its file."""
    file, _, name = (spec if not spec.endswith(".py") else f"{spec}:").rpartition(":")
    path = Path(file).absolute()
    if not path.is_file():
        raise ValueError(f"{flag}: there is no file {path}; give FILE.py:NAME")
    sys.path.insert(0, str(path.parent))
    defined = call_users(flag, functools.partial(runpy.run_path, str(path)))
    if not callable(defined.get(name)):
        names = [key for key, value in defined.items() if inspect.isfunction(value)]
        fault = f"{name!r} is no function" if name else "no function is named"
        raise ValueError(f"{flag}: {fault}; give FILE.py:NAME, of {names}")
    return defined[name]
