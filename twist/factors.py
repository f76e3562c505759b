"""Factors of a potential that are ready to use. Each has log phi [N] at most 0 for N texts:

    power             log phi = beta log score(text)
    keyword, regex    log phi = 0 where the continuation holds the word or pattern, else -strength
    without           log phi = 0 where the continuation does not hold the word, else -strength

At strength infinity, the default, a factor is hard: a text that misses has phi = 0. All but `power`
read the continuation alone, whose two ends count as ends of words, even where its last token leaves
a word unfinished. `without` has a prefix part log f_t (`tsmc/sampler.py`), the part of log phi that
no continuation can change: there only finished words count.
"""

import math
import re
from collections.abc import Callable

from torch import Tensor

from tinystories.errors import InputError
from twist.potential import Factor


def power(log_score: Callable[[list[str]], Tensor], beta: float) -> Factor:
    """phi = score^beta of whole texts; the score is above zero."""
    return Factor(lambda texts: beta * log_score(texts).double())


def search(pattern: str, if_found: float, if_not: float) -> Callable[[list[str]], list[float]]:
    """A function of texts: one number where the pattern is found, another where it is not."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        fault = f"{pattern!r} is not a regular expression ({error})"
        raise InputError(f"{fault}; see Python's module re") from error

    def values(texts: list[str]) -> list[float]:
        return [if_found if compiled.search(text) else if_not for text in texts]

    return values


def regex(pattern: str, strength: float = math.inf) -> Factor:
    """The continuation matches a Python regular expression; InputError where it is invalid."""
    return Factor(search(pattern, 0.0, -strength), "continuations")


def keyword(word: str, strength: float = math.inf) -> Factor:
    """The continuation holds the word (or words) as a whole, in capitals or not."""
    log_phi = search(rf"(?i)(?<!\w){re.escape(word)}(?!\w)", 0.0, -strength)
    return Factor(log_phi, "continuations", hints=(word,))


def without(word: str, strength: float = math.inf) -> Factor:
    """The continuation does not hold the word as a whole, in capitals or not."""
    start = rf"(?i)(?<!\w){re.escape(word)}"
    log_phi = search(rf"{start}(?!\w)", -strength, 0.0)
    log_prefix = search(rf"{start}(?=\W)", -strength, 0.0)  # behind a word that is finished
    return Factor(log_phi, "continuations", log_prefix)


READY = {"keyword": keyword, "regex": regex, "without": without}
"""Functions (argument, strength) -> Factor by name."""
