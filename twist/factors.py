"""The potential phi of whole texts, a product of factors, and ready factors, their log phi [N] at most 0.

    log phi(s_{1:T}) = sum of the factors' log phi, by default beta * log p(toxic | s)           (paper, Sec. 3, "Setup")

    power             log phi = beta log score(text)
    keyword, regex    log phi = 0 where the continuation holds the word or the pattern, else -strength
    first_sentence    log phi = -strength |words of the continuation's first sentence - wanted|

At strength infinity, the default, a factor is hard: what misses has phi = 0. The last three read the continuation alone,
since what stands in the prompt could not be missed. Its two ends count as the ends of words, also where the last of its T
tokens happens to leave a word unfinished. N texts.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.errors import InputError

READS = ("texts", "continuations", "tokens")
"""What a factor can read: N texts with the prompt, N texts without it, or the continuations as a tensor [N, T]."""
END_OF_SENTENCE = re.compile(r"""[.!?]+["')\]\u201d\u2019]*(?=\s|$)""")


@dataclass(frozen=True)
class Factor:
    """One factor of a potential, and what it reads."""

    log_phi: Callable[..., Tensor]  # one argument -> log phi [N]; at most 0 where exact samples are drawn by rejection
    reads: str = "texts"


def each_once(function: Callable[[list[str]], Tensor], texts: Sequence[str]) -> Tensor:
    """function(texts) [N], called with the distinct texts only."""
    place = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    return function(list(place))[torch.tensor([place[text] for text in texts], dtype=torch.long)]


class TextPotential:
    """log phi of continuation tokens (eq. 2): the product of its factors, each of which sees every distinct text once."""

    def __init__(self, factors: Sequence[Factor], decode: Callable[[list[list[int]]], list[str]], prompt: Tensor):
        """`decode` makes texts of rows of tokens; `prompt` [P] stands before every continuation."""
        self.factors, self.decode, self.prompt = factors, decode, prompt.tolist()

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, T]."""
        return self.decode([self.prompt + row for row in tokens.tolist()])

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T]"""
        texts = self.texts(tokens)
        start = len(self.decode([self.prompt])[0])
        log_phi = torch.zeros(len(tokens), device=tokens.device)
        for factor in self.factors:
            if factor.reads == "tokens":
                log_factor = factor.log_phi(tokens)
            else:
                read = texts if factor.reads == "texts" else [text[start:] for text in texts]
                log_factor = each_once(factor.log_phi, read)
            log_phi = log_phi + log_factor.to(tokens.device)
        return log_phi


def power(log_score: Callable[[list[str]], Tensor], beta: float) -> Factor:
    """phi = score^beta of whole texts; at beta = 0 phi is 1 even where the score is 0."""

    def log_phi(texts: list[str]) -> Tensor:
        return beta * log_score(texts) if beta > 0 else torch.zeros(len(texts))

    return Factor(log_phi)


def missed_by(distances: list[float], strength: float) -> Tensor:
    """log phi [N] = -strength * distance, 0 at distance 0 whatever the strength."""
    return torch.tensor([-strength * distance if distance > 0 else 0.0 for distance in distances])


Search = Callable[[re.Pattern, str], re.Match | None]


def regex(pattern: str, strength: float = math.inf, search: Search = re.Pattern.search) -> Factor:
    """The continuation holds a match of a Python regular expression; InputError where it is none.

    `search` may end a search that takes too long by raising.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"{pattern!r} is no regular expression ({error}); see the module re of Python") from error

    def log_phi(continuations: list[str]) -> Tensor:
        return missed_by([float(search(compiled, text) is None) for text in continuations], strength)

    return Factor(log_phi, reads="continuations")


def keyword(word: str, strength: float = math.inf) -> Factor:
    """The continuation holds the word (or words) as a whole, in capitals or not."""
    return regex(rf"(?i)(?<!\w){re.escape(word)}(?!\w)", strength)


def words_of_first_sentence(text: str) -> int:
    """Words before the first . ! or ? that ends a sentence; 0 where none does, for the sentence has no length then."""
    end = END_OF_SENTENCE.search(text)
    return sum(re.search(r"\w", part) is not None for part in text[: end.start()].split()) if end else 0


def first_sentence(words: int, strength: float = math.inf) -> Factor:
    """The continuation's first sentence, from behind the prompt to its full stop, has that many words."""

    def log_phi(continuations: list[str]) -> Tensor:
        return missed_by([abs(words_of_first_sentence(text) - words) for text in continuations], strength)

    return Factor(log_phi, reads="continuations")
