"""The potential phi of whole texts, and as each generation sees it.

    log phi(s_{1:T}) = sum of the factors' log phi, by default beta log p(toxic | s)    (Sec. 3)
    log phi^(m)(s) = log p^(0)(s) + log phi(s) - log p^(m)(s)                           eq. 8

The effective potential phi^(m) keeps the target sigma the same in every generation, because p^(m)
phi^(m) = p^(0) phi. Factors may be anybody's functions of texts; `twist/factors.py` has ready ones.
N texts, T tokens, P tokens of the prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from tinystories.decoder import NO_END
from tinystories.errors import InputError, reason_of
from tinystories.tokenizer import UNFINISHED
from tsmc.interfaces import LanguageModel, LogPotential, LogPrefix
from tsmc.proposal import sample_proposal, sequence_log_probs
from tsmc.sampler import Sigma

READS = ("texts", "continuations")
"""What a factor can read: N texts with the prompt, or without it."""
ROUNDING = 0.1  # relative error of log phi: as much has a network in half precision
ALONE = 8  # texts that `check_potential` scores one by one
BEGUN = 200  # texts whose beginnings it scores


@dataclass(frozen=True)
class Factor:
    """One factor of a potential, and what it reads."""

    log_phi: Callable[[list[str]], Any]  # N texts -> N numbers, at most 0 for rejection
    reads: str = "texts"
    log_prefix: Callable[[list[str]], Any] | None = None  # N unfinished texts -> N numbers log f_t
    name: str = "the potential"  # in messages
    hints: Sequence[str] = ()  # a text with phi > 0 is likely to hold one of them

    def __post_init__(self):
        if self.reads not in READS:
            raise InputError(f"a factor reads {self.reads!r}; give one of {', '.join(READS)}")
        if isinstance(self.hints, str) or not all(self.hints):
            raise InputError(f"the hints are {self.hints!r}; give a list of words")


def factor_of(function: Any) -> Factor:
    """A function as a factor; `reads`, `prefix` and `hints` may be its attributes."""
    names = [name for name in ("reads", "hints") if hasattr(function, name)]
    given = {name: getattr(function, name) for name in names}
    return Factor(function, log_prefix=getattr(function, "prefix", None), **given)


def as_log_phi(values: Any, texts: Sequence[str]) -> Tensor:
    """log phi [N] float64 on the CPU of what a potential has returned for N texts.

    float64 keeps the differences of values as large as 1e8. InputError for another shape, for
    truth values, which are no logarithms, and for NaN and +inf, with the text at fault.
    """
    try:
        is_truth = torch.as_tensor(values).dtype == torch.bool
        numbers = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        fault = f"log phi cannot be read as numbers ({reason_of(error)})"
        raise InputError(f"{fault}; return one number for each text") from error
    if is_truth:
        raise InputError("log phi is true or false; return 0 for true and -inf for false")
    if numbers.shape != (len(texts),):
        fault = f"log phi has shape {list(numbers.shape)} for {len(texts)} texts"
        raise InputError(f"{fault}; return one number for each text")
    for number, text in zip(numbers.tolist(), texts, strict=True):
        if not number < math.inf:
            raise InputError(f"log phi is {number} for {text[:80]!r}; return numbers < inf")
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
        factors: Sequence[Factor | Callable[[list[str]], Any]],
        decode: Callable[[list[list[int]]], list[str]],
        prompt: Tensor,
        end: int = NO_END,
        encode: Callable[[str], list[int]] | None = None,
    ):
        """`decode` makes texts of rows of tokens; `prompt` [P] precedes every continuation.

        `encode` makes tokens of a text, without special ones; without it hints are not used.
        A plain function of texts counts as a factor (`factor_of`). What follows the first token
        `end` does not belong to a text, nor does that token.
        """
        self.factors = [part if isinstance(part, Factor) else factor_of(part) for part in factors]
        self.decode = decode
        self.prompt = torch.as_tensor(prompt).flatten().tolist()
        self.end = end
        self.encode = encode
        self.scale = 1.0  # phi^(1/scale) is what the surrogate learns (`twist/surrogate.py`)
        self.is_checked = False  # by `check_potential`

    @property
    def hints(self) -> list[list[list[int]]]:
        """The tokens of each hint of each factor that has some (`twist/forced.py`)."""
        encode = self.encode
        if encode is None:
            return []
        start = len(encode("a"))  # nearly every text has a word behind a space
        hinted = [factor for factor in self.factors if factor.hints]
        return [[encode(f"a {hint}")[start:] for hint in one.hints] for one in hinted]

    def texts(self, tokens: Tensor) -> list[str]:
        """The texts, prompt included, of continuations tokens [N, T], finished or not.

        A last character of which the tokens give only a part is left out.
        """
        rows = tokens.tolist()
        if self.end != NO_END:
            rows = [row[: row.index(self.end)] if self.end in row else row for row in rows]
        return [
            text.rstrip(UNFINISHED) for text in self.decode([self.prompt + row for row in rows])
        ]

    def __call__(self, tokens: Tensor) -> Tensor:
        """log phi [N] float64 of tokens [N, T]."""
        return self.of_texts(self.texts(tokens)).to(tokens.device)

    def of_texts(self, texts: list[str]) -> Tensor:
        """log phi [N] float64 on the CPU of texts, prompt included."""
        log_phi = torch.zeros(len(texts), dtype=torch.float64)
        for factor in self.factors:
            log_phi = log_phi + self.apply(factor.log_phi, factor.reads, texts)
        return log_phi

    def apply(self, function: Any, reads: str, texts: list[str]) -> Tensor:
        """A function of a factor on what it reads [N], called once for equal texts."""
        start = len(self.decode([self.prompt])[0]) if reads == "continuations" else 0
        return each_once(function, [text[start:] for text in texts])

    @property
    def log_prefix(self) -> LogPrefix | None:
        """log f_t [N] of tokens [N, t]: the sum of the prefix parts; None where there are none."""
        parts = [factor for factor in self.factors if factor.log_prefix is not None]

        def log_f(tokens: Tensor) -> Tensor:
            texts = self.texts(tokens)
            values = [self.apply(part.log_prefix, part.reads, texts) for part in parts]
            return torch.stack(values).sum(0).to(tokens.device)

        return log_f if parts else None


@torch.no_grad()
def check_potential(
    model: LanguageModel, log_phi: Callable[[Tensor], Tensor], generator: Generator
) -> None:
    """InputError where a potential does not fit the model, or is wrong on some of its texts.

    Prompt and end must be the model's. A factor and its prefix part must depend on their text
    alone, and a prefix part must be positive wherever phi can still be. Every learner and `sample`
    ask this of a TextPotential once.
    """
    if not isinstance(log_phi, TextPotential):
        return
    prompt = getattr(model, "prompt", None)
    if log_phi.end != model.end or (prompt is not None and prompt.tolist() != log_phi.prompt):
        raise InputError("the potential and the model differ in prompt or end; give both alike")
    if log_phi.is_checked:
        return
    count = ALONE if log_phi.log_prefix is None else BEGUN
    tokens = sample_proposal(model, None, count, generator).tokens  # [N, T]
    for factor in log_phi.factors:
        log_phi_of = check_alone(log_phi, factor, factor.log_phi, tokens, range(ALONE))  # [N]
        for t in range(1, tokens.shape[1] if factor.log_prefix else 1):
            begun = tokens[:, :t]  # [N, t]
            log_f = check_alone(log_phi, factor, factor.log_prefix, begun, [t % count])  # [N]
            is_killed = (log_f == -torch.inf) & (log_phi_of > -torch.inf)
            if is_killed.any():
                fault = f"log f of {log_phi.texts(begun[is_killed])[0][-80:]!r} is -inf"
                remedy = "let it be a number wherever a continuation has phi > 0, as here"
                raise InputError(f"{factor.name}: {fault}; {remedy}")
    log_phi.is_checked = True


def check_alone(
    potential: TextPotential, factor: Factor, function: Any, tokens: Tensor, rows: Sequence[int]
) -> Tensor:
    """A function of a factor on tokens [N, t], as `apply` gives it [N].

    InputError where one of the rows, asked alone, differs by more than ROUNDING.
    """
    texts = potential.texts(tokens)
    together = potential.apply(function, factor.reads, texts)  # [N]
    largest = max(1.0, together.where(together > -torch.inf, 0.0).abs().max().item())
    for row in rows:
        number = together[row].item()
        alone = potential.apply(function, factor.reads, texts[row : row + 1]).item()
        if alone != number and not abs(alone - number) <= ROUNDING * largest:
            numbers = f"is {number:.4g} in a batch, {alone:.4g} alone"
            fault = f"{factor.name}: the number of {texts[row][-80:]!r} {numbers}"
            raise InputError(f"{fault}; it must depend on its text alone")
    return together


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: LanguageModel) -> LogPotential:
    """phi^(m) (eq. 8): one teacher-forced pass of the base model; log_p [N] is that of p^(m)."""
    return lambda tokens, log_p: sequence_log_probs(base, tokens) + log_phi(tokens) - log_p


def seen_from(
    model: LanguageModel,
    base: LanguageModel,
    log_phi: Callable[[Tensor], Tensor],
    is_effective: bool = True,
) -> Sigma:
    """sigma as p^(m) = model sees it: through phi^(m) (eq. 8), which is phi if p^(m) is p^(0).

    Without `is_effective` phi stays as it is, and the target drifts with p^(m). Only p^(0) has the
    prefix part: another p^(m) has learned what it says, which would count twice (measured in
    docs/results.md). Any f that is positive where phi is leaves Z-hat unbiased, f = 1 as well.
    """
    if model is base:
        log_prefix = getattr(log_phi, "log_prefix", None)
        return Sigma(model, lambda tokens, log_p: log_phi(tokens), log_prefix)
    if not is_effective:
        return Sigma(model, lambda tokens, log_p: log_phi(tokens))
    return Sigma(model, effective_potential(log_phi, base))
