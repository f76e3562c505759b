"""The potential phi of whole texts: a product of factors.

    log phi(s_{1:T}) = sum of the factors' log phi, by default beta log p(toxic | s)    (Sec. 3)

A factor is any function of N texts that returns log phi, N numbers below infinity; it may have
attributes:

    reads     "texts" (with the prompt, the default), "continuations" (without it), or "finished":
              N pairs (continuation, whether a token `end` has finished it)
    prefix    a function of the same form of unfinished texts that returns log f_t, N numbers
    hints     a list of words, of which a text with phi > 0 is likely to hold one
    name      how messages call it

`twist/factors.py` has factors that are ready to use. N texts, T tokens, P tokens of the prompt.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from tinystories.decoder import NO_END, Conditional, End, is_end
from tsmc.proposal import sample_proposal
from tsmc.sigma import LogPrefix
from twist.guards import REPEATED, check_equal, each_once, name_of

READS = ("texts", "continuations", "finished")
UNFINISHED = "\ufffd"  # what decoding gives for some of the tokens of a character
FORMS = (str.lower, str.capitalize, str.title, str.upper, str)  # of a hint
MOST_HINTS = 6  # factors whose hints are used, as forced draws take 2^F times as long
ALONE = 8  # texts that `check_potential` scores one by one
BEGUN = 200  # texts whose beginnings it scores


class TextPotential:
    """log phi of continuations (eq. 2): a product of factors, evaluated once for equal texts."""

    def __init__(
        self,
        factors: Sequence[Callable[[list], Any]],
        decode: Callable[[list[list[int]]], list[str]],
        prompt: Tensor,
        end: End = NO_END,
        encode: Callable[[str], list[int]] | None = None,
    ):
        """`decode` makes texts of rows of tokens; `prompt` [P] precedes every continuation.

        `encode` makes tokens of a text, without special ones; without it hints are not used. What
        follows the first token `end` does not belong to a text, nor does that token.
        """
        for factor in factors:
            name, hints = name_of(factor), getattr(factor, "hints", [])
            if (reads := getattr(factor, "reads", "texts")) not in READS:
                raise ValueError(f"{name} reads {reads!r}; give one of {', '.join(READS)}")
            is_list = isinstance(hints, (list, tuple))
            if not is_list or not all(isinstance(hint, str) and hint.strip() for hint in hints):
                raise ValueError(f"{name} has hints {hints!r}; give a list of words")
        self.factors = list(factors)
        self.decode = decode
        self.prompt = torch.as_tensor(prompt).flatten().tolist()
        self.end = tuple(end) if isinstance(end, list) else end
        self.encode = encode
        self.is_checked = False  # by `check_potential`

    @property
    def hints(self) -> list[list[tuple[int, ...]]]:
        """For forced draws, of each factor that has hints their tokens, as p may write them.

        That is in small letters or capitals or as given, behind a space or a quotation mark.
        """
        hinted = [factor.hints for factor in self.factors if getattr(factor, "hints", [])]
        return [self.spellings(words) for words in hinted[:MOST_HINTS] if self.encode]

    def spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of words in all forms, each once.

        p may also write a word by other tokens than the tokenizer: those of its two parts, wherever
        it is parted.
        """
        assert self.encode, "give encode"
        spelled = dict.fromkeys(form(word) for form in FORMS for word in words)
        found: dict[tuple[int, ...], None] = {}
        for before, word in itertools.product(("a ", '"'), spelled):
            first = self.encode(before.strip())
            whole = self.encode(before + word)[len(first) :]
            (text,) = self.decode([first + whole])
            for place in range(len(word)):
                left = self.encode(before + word[:place])[len(first) :] if place else []
                tokens = left + self.encode(word[place:]) if place else whole
                if tokens and self.decode([first + tokens]) == [text]:
                    found[tuple(tokens)] = None
        return list(found)

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, T], finished or not.

        A last character of which the tokens give only a part is left out.
        """
        rows = tokens.tolist()
        if self.end != NO_END:
            lengths = (~is_end(tokens, self.end)).long().cumprod(1).sum(1).tolist()  # before an end
            rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        (start,) = self.decode([self.prompt])
        texts = self.decode([self.prompt + row for row in rows])
        for n, row in enumerate(rows):
            # A byte that makes no character may take those of the prompt before it along.
            if not texts[n].startswith(start):
                texts[n] = start + self.decode([row])[0]
        return [text.rstrip(UNFINISHED) for text in texts]

    def continuations(self, texts: list[str]) -> list[str]:
        """The texts without the prompt."""
        start = len(self.decode([self.prompt])[0])
        return [text[start:] for text in texts]

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] float64 of tokens [N, T]."""
        finished = is_end(tokens, self.end).any(1).tolist()
        return self.of_texts(self.texts(tokens), finished).to(tokens.device)

    def of_texts(self, texts: list[str], finished: list[bool] | None = None) -> Tensor:
        """log phi [N] float64 on the CPU of texts, prompt included; all are finished by default."""
        log_phi = torch.zeros(len(texts), dtype=torch.float64)
        for factor in self.factors:
            log_phi = log_phi + self.apply(factor, factor, texts, finished)
        return log_phi

    def apply(self, factor: Any, function: Any, texts: list[str], finished: Any) -> Tensor:
        """A factor or its prefix part, as `function`, on what the factor reads [N]."""
        reads = getattr(factor, "reads", "texts")
        read: list[Any] = texts
        if reads != "texts":
            read = self.continuations(texts)
        if reads == "finished":
            read = list(zip(read, finished or [True] * len(read), strict=True))
        name = name_of(factor) + ("" if function is factor else ".prefix")
        return each_once(function, read, name)

    @property
    def log_prefix(self) -> LogPrefix | None:
        """log f_t [N] of tokens [N, t]: the sum of the prefix parts; None where there are none."""
        parts = [factor for factor in self.factors if hasattr(factor, "prefix")]

        def log_f(tokens: Tensor) -> Tensor:
            texts, finished = self.texts(tokens), is_end(tokens, self.end).any(1).tolist()
            values = [self.apply(part, part.prefix, texts, finished) for part in parts]
            return torch.stack(values).sum(0).to(tokens.device)

        return log_f if parts else None


@torch.no_grad()
def check_potential(
    model: Conditional, log_phi: Callable[[Tensor], Tensor], generator: Generator
) -> None:
    """ValueError where a TextPotential does not fit the model, or is wrong on some of its texts.

    Prompt and end must be the model's. A factor and its prefix part must depend on their text
    alone, and a prefix part must be positive wherever phi can still be.
    """
    if not isinstance(log_phi, TextPotential):
        return
    if log_phi.end != model.end or model.prompt.tolist() != log_phi.prompt:
        raise ValueError("the potential and the model differ in prompt or end; give both alike")
    if log_phi.is_checked:  # a learner, then `sample`: once is enough
        return
    count = ALONE if log_phi.log_prefix is None else BEGUN
    tokens = sample_proposal(model, None, count, generator).tokens  # [N, T]
    for factor in log_phi.factors:
        log_phi_of = check_alone(log_phi, factor, factor, tokens, range(ALONE))  # [N]
        for t in range(1, tokens.shape[1] if hasattr(factor, "prefix") else 1):
            begun = tokens[:, :t]  # [N, t]
            log_f = check_alone(log_phi, factor, factor.prefix, begun, [t % count])  # [N]
            is_killed = (log_f == -torch.inf) & (log_phi_of > -torch.inf)
            if is_killed.any():
                fault = f"log f of {log_phi.texts(begun[is_killed])[0][-80:]!r} is -inf"
                remedy = "let it be a number wherever a continuation has phi > 0, as here"
                raise ValueError(f"{name_of(factor)}: {fault}; {remedy}")
    log_phi.is_checked = True


def check_alone(
    potential: TextPotential, factor: Any, function: Any, tokens: Tensor, rows: Sequence[int]
) -> Tensor:
    """A factor or its prefix part on tokens [N, t], as `apply` gives it [N].

    ValueError where a second call differs, or one of the rows when it is asked alone.
    """
    texts, finished = potential.texts(tokens), is_end(tokens, potential.end).any(1).tolist()
    together = potential.apply(factor, function, texts, finished)  # [N]
    again = potential.apply(factor, function, texts, finished)
    check_equal(together, again, texts, factor, REPEATED)
    alone = [potential.apply(factor, function, [texts[row]], [finished[row]]) for row in rows]
    check_equal(together[list(rows)], torch.cat(alone), [texts[row] for row in rows], factor)
    return together
