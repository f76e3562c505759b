"""Factors of a potential that are ready to use. Each has log phi [N] at most 0 for N texts:

    power             log phi = beta log score(text)
    keyword, regex    log phi = 0 where the continuation holds the word or pattern, else -strength
    without           log phi = 0 where the continuation does not hold the word, else -strength
    first_sentence    log phi = -strength |words of the continuation's first sentence - wanted|

At strength infinity, the default, a factor is hard: a text that misses has phi = 0. All but `power`
read the continuation alone, whose two ends count as ends of words, even where its last token leaves
a word unfinished. `without` and `first_sentence` have a prefix part log f_t (`tsmc/sampler.py`),
the part of log phi that no continuation can change: there only finished words and sentences count.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tinystories.errors import InputError
from twist.potential import Factor

END_OF_SENTENCE = re.compile(r"""[.!?]+["')\]\u201d\u2019]*(?=\s|$)""")


def power(log_score: Callable[[list[str]], Tensor], beta: float) -> Factor:
    """phi = score^beta of whole texts; at beta = 0 phi is 1 even where the score is 0."""

    def log_phi(texts: list[str]) -> Tensor:
        return beta * log_score(texts).double() if beta > 0 else torch.zeros(len(texts))

    return Factor(log_phi)


def log_phi_of_misses(distances: Sequence[float], strength: float) -> list[float]:
    """log phi = -strength * distance, 0 at distance 0 whatever the strength."""
    return [-strength * distance if distance > 0 else 0.0 for distance in distances]


def regex(pattern: str, strength: float = math.inf) -> Factor:
    """The continuation matches a Python regular expression; InputError where it is invalid."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        fault = f"{pattern!r} is not a regular expression ({error})"
        raise InputError(f"{fault}; see Python's module re") from error

    def log_phi(continuations: list[str]) -> list[float]:
        misses = [float(compiled.search(text) is None) for text in continuations]
        return log_phi_of_misses(misses, strength)

    return Factor(log_phi, reads="continuations")


def keyword(word: str, strength: float = math.inf) -> Factor:
    """The continuation holds the word (or words) as a whole, in capitals or not."""
    return regex(rf"(?i)(?<!\w){re.escape(word)}(?!\w)", strength)


def without(word: str, strength: float = math.inf) -> Factor:
    """The continuation does not hold the word as a whole, in capitals or not."""
    start = rf"(?i)(?<!\w){re.escape(word)}"

    def log_phi(pattern: str, continuations: list[str]) -> list[float]:
        hits = [float(re.search(pattern, text) is not None) for text in continuations]
        return log_phi_of_misses(hits, strength)

    whole, finished = rf"{start}(?!\w)", rf"{start}(?=\W)"
    return Factor(partial(log_phi, whole), "continuations", partial(log_phi, finished))


def count_words(text: str) -> int:
    """Parts between spaces that hold a letter or digit."""
    return sum(re.search(r"\w", part) is not None for part in text.split())


def words_of_first_sentence(text: str) -> int:
    """Words before the first . ! or ? that ends a sentence; 0 where no sentence ends."""
    end = END_OF_SENTENCE.search(text)
    return 0 if end is None else count_words(text[: end.start()])


def first_sentence(words: int, strength: float = math.inf) -> Factor:
    """The continuation's first sentence, from its start to its full stop, has that many words."""

    def log_phi(continuations: list[str]) -> list[float]:
        distances = [abs(words_of_first_sentence(text) - words) for text in continuations]
        return log_phi_of_misses(distances, strength)

    def log_prefix(beginnings: list[str]) -> list[float]:
        """A sentence has ended once a space follows; before, it may only be too long already."""
        distances = []
        for text in beginnings:
            end = END_OF_SENTENCE.search(text)
            if end is not None and end.end() < len(text):
                distances.append(abs(count_words(text[: end.start()]) - words))
            else:  # one that never ends has no words
                distances.append(min(max(0, count_words(text) - words), words))
        return log_phi_of_misses(distances, strength)

    return Factor(log_phi, "continuations", log_prefix)


READY = {"keyword": keyword, "regex": regex, "without": without, "first-sentence": first_sentence}
"""Functions (argument, strength) -> Factor by name."""
