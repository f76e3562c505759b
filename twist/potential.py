"""The potential phi of whole texts: a product of factors. N texts, t or T tokens, prompt [P].

    log phi(s_{1:T}) = sum of the factors' log phi, by default beta log p(toxic | s)    (Sec. 3)

A factor is any function of N texts that returns N numbers log phi below infinity, each of which
depends on its text alone. One thread after the other calls it. It may have attributes:

    reads     "texts" (with the prompt, the default), "continuations" (without it), or "finished":
              N pairs (continuation, whether a token `end` has finished it)
    prefix    a function of the same form of unfinished texts that returns log f_t, N numbers
    hints     a list of words, of which a text with phi > 0 is likely to hold one (`beyond/`)

`--potential` names a factor; ~8 before the colon puts -8 in place of -inf:

    toxicity, nontoxicity         beta log p(toxic | s), or of not toxic (`eval/world.py`)
    keyword:WORD, without:WORD    0 where the continuation has the word, or lacks it, else -inf
    regex:PATTERN                 0 where the continuation matches, else -inf
    ended                         0 where a token `end` has finished the text, else -inf
    FILE.py:NAME                  a function of your own
"""

import math
import re
import runpy
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinystories.decoder import End
from tinystories.load import located

# Letters of Chinese, Japanese, Thai and their neighbours, which have no spaces, end no word.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff"
LETTER = rf"[^\W{UNSPACED}\U00020000-\U0003ffff]"
EDGE = rf"(?:(?<!{LETTER})|(?!{LETTER}))"  # of a word: no letters on both sides
ONE_AT_A_TIME = threading.RLock()  # a function of a user's need not bear two threads


class TextPotential:
    """log phi of continuations (eq. 2): a product of factors, evaluated once for equal texts."""

    def __init__(
        self, factors: list[Any], decode: Callable[..., list[str]], prompt: Tensor, end: End = ()
    ):
        """`decode` makes texts of rows of tokens; a text ends before the first token of `end`."""
        self.factors = factors
        self.decode = decode
        self.prompt = prompt.tolist()
        self.end = set(end)
        self.has_prefix = any(hasattr(factor, "prefix") for factor in factors)

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] float64 of tokens [N, T]; ValueError for NaN and infinity."""
        return self.total(tokens, [(factor, factor) for factor in self.factors])

    def log_prefix(self, tokens: Tensor) -> Tensor:
        """log f_t [N] float64 of beginnings tokens [N, t], the sum of the prefix parts."""
        return self.total(tokens, [(f, f.prefix) for f in self.factors if hasattr(f, "prefix")])

    def total(self, tokens: Tensor, functions: list[tuple[Any, Callable]]) -> Tensor:
        """The sum [N] of functions, each with its factor, of what the factor reads of tokens."""
        texts = self.texts(tokens)
        start = len(self.decode([self.prompt])[0])
        continuations = [text[start:] for text in texts]
        is_finished = [not self.end.isdisjoint(row) for row in tokens.tolist()]
        finished = list(zip(continuations, is_finished, strict=True))
        views = {"texts": texts, "continuations": continuations, "finished": finished}
        values = []  # of each function [N]
        for factor, function in functions:
            with ONE_AT_A_TIME:
                values.append(each_once(function, views[getattr(factor, "reads", "texts")]))
        return torch.stack(values).sum(0).to(tokens.device)

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, t], finished or not."""
        rows = []
        for row in tokens.tolist():
            ends = [t for t, token in enumerate(row) if token in self.end]
            rows.append(self.prompt + (row[: ends[0]] if ends else row))
        # The tokens may give only a part of a text's last character.
        return [text.rstrip("\ufffd") for text in self.decode(rows)]


def each_once(function: Callable[[list], Any], texts: list) -> Tensor:
    """function(texts) [N] float64, of distinct texts; ValueError unless all are below infinity."""
    number = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    found = function(list(number))
    values = torch.as_tensor(found, dtype=torch.float64).detach().cpu()
    is_bool = torch.as_tensor(found).dtype == torch.bool  # true and false are no logarithms
    if values.shape != (len(number),) or is_bool or not bool((values < torch.inf).all()):
        name = getattr(function, "__name__", "the potential")
        raise ValueError(f"{name} must return log phi, a number below infinity for each text")
    return values[[number[text] for text in texts]]


def search(pattern: str, if_found: float, if_not: float) -> Any:
    """A factor of continuations: one number where the pattern is found, another where it is not."""
    compiled = re.compile(pattern)

    def factor(texts: list[str]) -> list[float]:
        return [if_found if compiled.search(text) else if_not for text in texts]

    factor.reads = "continuations"
    return factor


def factor_of(spec: str) -> Any:
    """The factor that --potential names; ValueError where it is not understood."""
    head, _, argument = spec.partition(":")
    name, tilde, number = head.partition("~")
    miss = -float(number) if tilde else -math.inf
    word = rf"(?i){EDGE}{re.escape(argument)}{EDGE}"  # ends of a continuation end words, too
    if name.endswith(".py"):
        file = located(name)
        sys.path.insert(0, str(file.absolute().parent))  # for modules beside the file
        defined = runpy.run_path(str(file))
        if callable(defined.get(argument)):
            return defined[argument]
    if name == "keyword" and argument.strip():
        factor = search(word, 0.0, miss)
        factor.hints = [argument]
        return factor
    if name == "without" and argument.strip():
        factor = search(word, miss, 0.0)
        # The part of log phi that no continuation can change: something follows the word.
        factor.prefix = search(rf"{word}(?=[\s\S])", miss, 0.0)
        return factor
    if name == "regex" and argument:
        return search(argument, 0.0, miss)
    if name == "ended" and not argument:
        factor = lambda pairs: [0.0 if is_finished else miss for _, is_finished in pairs]  # noqa: E731
        factor.reads = "finished"
        return factor
    raise ValueError(f"--potential {spec}: is not understood; twist/potential.py lists the forms")
