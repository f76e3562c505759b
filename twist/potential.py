"""The potential phi of whole texts, and as each generation sees it.

    log phi(s_{1:T}) = sum of the factors' log phi, by default beta log p(toxic | s)    (Sec. 3)
    log phi^(m)(s) = log p^(0)(s) + log phi(s) - log p^(m)(s)                           eq. 8

The effective potential phi^(m) keeps the target sigma the same in every generation, because p^(m)
phi^(m) = p^(0) phi. Ready factors have log phi [N] at most 0:

    power             log phi = beta log score(text)
    keyword, regex    log phi = 0 where the continuation holds the word or pattern, else -strength
    first_sentence    log phi = -strength |words of the continuation's first sentence - wanted|

At strength infinity, the default, a factor is hard: a text that misses has phi = 0. The last three
read the continuation alone, whose two ends count as ends of words, even where its last token leaves
a word unfinished. N texts, T tokens, P tokens of the prompt.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinystories.decoder import NO_END
from tinystories.errors import InputError
from tsmc.categorical import widest
from tsmc.interfaces import BaseModel, LanguageModel, LogPotential
from tsmc.proposal import sequence_log_probs
from tsmc.sampler import Sigma
from twist.adapter import Adapted

READS = ("texts", "continuations", "tokens")
"""What a factor can read: N texts with the prompt, N texts without it, or tokens [N, T]."""
END_OF_SENTENCE = re.compile(r"""[.!?]+["')\]\u201d\u2019]*(?=\s|$)""")


@dataclass(frozen=True)
class Factor:
    """One factor of a potential, and what it reads."""

    log_phi: Callable[..., Any]  # of what it reads -> N numbers log phi, at most 0 for rejection
    reads: str = "texts"


def as_log_phi(values: Any, read: Sequence) -> Tensor:
    """log phi [N] float64 on the CPU of what a potential has returned for the N members of `read`.

    float64 keeps the differences of values as large as 1e8. InputError for another shape, for
    truth values, which are no logarithms, and for NaN and +inf, with the text at fault.
    """
    numbers = torch.as_tensor(values).detach().cpu()
    if numbers.dtype == torch.bool:
        raise InputError("log phi is true or false; return 0 for true and -inf for false")
    numbers = numbers.to(torch.float64)
    if numbers.shape != (len(read),):
        raise InputError(f"log phi has shape {list(numbers.shape)} for {len(read)} texts")
    for number, text in zip(numbers.tolist(), read, strict=True):
        if not number < math.inf:
            raise InputError(f"log phi is {number} for {str(text)[:80]!r}; return numbers < inf")
    return numbers


def each_once(function: Callable[[list[str]], Any], texts: Sequence[str]) -> Tensor:
    """function(texts) [N] float64, called with the distinct texts only."""
    place = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    values = as_log_phi(function(list(place)), list(place))
    return values[torch.tensor([place[text] for text in texts], dtype=torch.long)]


class TextPotential:
    """log phi of continuations (eq. 2): a product of factors, evaluated once for equal texts."""

    def __init__(
        self,
        factors: Sequence[Factor],
        decode: Callable[[list[list[int]]], list[str]],
        prompt: Tensor,
        end: int = NO_END,
    ):
        """`decode` makes texts of rows of tokens; `prompt` [P] precedes every continuation.

        What follows the first token `end` does not belong to a text, nor does that token.
        """
        self.factors = factors
        self.decode = decode
        self.prompt = prompt.tolist()
        self.end = end

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, T]."""
        rows = tokens.tolist()
        if self.end != NO_END:
            rows = [row[: row.index(self.end)] if self.end in row else row for row in rows]
        return self.decode([self.prompt + row for row in rows])

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] of tokens [N, T], in the widest type of their device."""
        log_phi = self.of_texts(self.texts(tokens), tokens)
        return log_phi.to(tokens.device, widest(tokens.device))

    def of_texts(self, texts: list[str], tokens: Tensor | None = None) -> Tensor:
        """log phi [N] float64 on the CPU; InputError for a factor that reads tokens without any."""
        start = len(self.decode([self.prompt])[0])
        log_phi = torch.zeros(len(texts), dtype=torch.float64)
        for factor in self.factors:
            if factor.reads != "tokens":
                read = texts if factor.reads == "texts" else [text[start:] for text in texts]
                log_phi = log_phi + each_once(factor.log_phi, read)
            elif tokens is not None:
                log_phi = log_phi + as_log_phi(factor.log_phi(tokens), tokens)
            else:
                raise InputError("the potential reads tokens, not texts; score texts without it")
        return log_phi


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


def words_of_first_sentence(text: str) -> int:
    """Words before the first . ! or ? that ends a sentence; 0 where no sentence ends."""
    end = END_OF_SENTENCE.search(text)
    if end is None:
        return 0
    return sum(re.search(r"\w", part) is not None for part in text[: end.start()].split())


def first_sentence(words: int, strength: float = math.inf) -> Factor:
    """The continuation's first sentence, from its start to its full stop, has that many words."""

    def log_phi(continuations: list[str]) -> list[float]:
        distances = [abs(words_of_first_sentence(text) - words) for text in continuations]
        return log_phi_of_misses(distances, strength)

    return Factor(log_phi, reads="continuations")


def base_potential(log_phi: Callable[[Tensor], Tensor]) -> LogPotential:
    """phi as the sampler takes it in generation 0, where it samples p^(0) itself."""
    return lambda tokens, log_p: log_phi(tokens)


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: LanguageModel) -> LogPotential:
    """phi^(m) (eq. 8): one teacher-forced pass of the base model; log_p [N] is that of p^(m)."""
    return lambda tokens, log_p: sequence_log_probs(base, tokens) + log_phi(tokens) - log_p


def seen_from(
    model: BaseModel | Adapted,
    base: BaseModel,
    log_phi: Callable[[Tensor], Tensor],
    is_effective: bool = True,
) -> Sigma:
    """sigma as p^(m) = model sees it: through phi^(m) (eq. 8), which is phi if p^(m) is p^(0).

    Without `is_effective` phi stays as it is, and the target drifts with p^(m).
    """
    if model is base or not is_effective:
        return Sigma(model.packed(), base_potential(log_phi))
    return Sigma(model.packed(), effective_potential(log_phi, base.packed()))
