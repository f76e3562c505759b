"""The potential phi of whole texts, and as each generation sees it.

    log phi(s_{1:T}) = sum of the factors' log phi, by default beta log p(toxic | s)    (Sec. 3)
    log phi^(m)(s) = log p^(0)(s) + log phi(s) - log p^(m)(s)                           eq. 8

The effective potential phi^(m) keeps the target sigma the same in every generation, because p^(m)
phi^(m) = p^(0) phi. Factors may be anybody's functions; `twist/factors.py` has ready ones. N texts,
T tokens, P tokens of the prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from tinystories.decoder import NO_END
from tinystories.errors import InputError, reason_of
from tsmc.categorical import widest
from tsmc.interfaces import BaseModel, LanguageModel, LogPotential, LogPrefix
from tsmc.proposal import sample_proposal, sequence_log_probs
from tsmc.sampler import Sigma
from twist.adapter import Adapted

READS = ("texts", "continuations", "tokens")
"""What a factor can read: N texts with the prompt, N texts without it, or tokens [N, T]."""


@dataclass(frozen=True)
class Factor:
    """One factor of a potential, and what it reads."""

    log_phi: Callable[..., Any]  # of what it reads -> N numbers log phi, at most 0 for rejection
    reads: str = "texts"
    log_prefix: Callable[..., Any] | None = None  # of the same, unfinished -> N numbers log f_t
    name: str = "the potential"  # in messages

    def __post_init__(self):
        if self.reads not in READS:
            raise InputError(f"a factor reads {self.reads!r}; give one of {', '.join(READS)}")


def as_log_phi(values: Any, read: Sequence | Tensor) -> Tensor:
    """log phi [N] float64 on the CPU of what a potential has returned for the N members of `read`.

    float64 keeps the differences of values as large as 1e8. InputError for another shape, for
    truth values, which are no logarithms, and for NaN and +inf, with the text at fault.
    """
    is_list = isinstance(values, list | tuple)  # of which PyTorch would make float32, and 1 of True
    try:
        numbers = torch.as_tensor(values, dtype=torch.float64 if is_list else None).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"log phi cannot be read as numbers ({reason_of(error)})") from error
    if numbers.dtype == torch.bool or (is_list and any(type(value) is bool for value in values)):
        raise InputError("log phi is true or false; return 0 for true and -inf for false")
    if numbers.is_complex():
        raise InputError("log phi is complex; return real numbers")
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

    def check_alike(self, model: BaseModel) -> None:
        """InputError where the model has another prompt or another end."""
        prompt = getattr(model, "prompt", None)
        if self.end != model.end or (prompt is not None and prompt.tolist() != self.prompt):
            raise InputError("the potential and the model differ in prompt or end; give both alike")

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
        log_phi = torch.zeros(len(texts), dtype=torch.float64)
        for factor in self.factors:
            log_phi = log_phi + self.apply(factor.log_phi, factor.reads, texts, tokens)
        return log_phi

    def apply(self, function: Any, reads: str, texts: list[str], tokens: Tensor | None) -> Tensor:
        """A function of a factor on what it reads [N], called once for equal texts."""
        if reads != "tokens":
            start = len(self.decode([self.prompt])[0]) if reads == "continuations" else 0
            return each_once(function, [text[start:] for text in texts])
        if tokens is None:
            raise InputError("the potential reads tokens, not texts; score texts without it")
        return as_log_phi(function(tokens.clone()), tokens)

    @property
    def log_prefix(self) -> LogPrefix | None:
        """log f_t [N] of tokens [N, t]: the sum of the prefix parts; None where there are none."""
        if all(factor.log_prefix is None for factor in self.factors):
            return None

        def log_f(tokens: Tensor) -> Tensor:
            parts = [self.prefix_of(factor, tokens) for factor in self.factors if factor.log_prefix]
            return torch.stack(parts).sum(0).to(tokens.device, widest(tokens.device))

        return log_f

    def prefix_of(self, factor: Factor, tokens: Tensor) -> Tensor:
        """log f_t [N] of one factor, without a last character that is not yet whole."""
        texts = [] if factor.reads == "tokens" else self.texts(tokens)
        texts = [text.rstrip("\ufffd") for text in texts]
        return self.apply(factor.log_prefix, factor.reads, texts, tokens)


@torch.no_grad()
def check_potential(model: LanguageModel, potential: TextPotential, generator: Generator) -> None:
    """InputError where a factor, or its prefix part, is wrong on some texts of the model.

    Both must depend on their text alone; a prefix part must be positive wherever phi can still be.
    """
    count = 8 if potential.log_prefix is None else 200
    tokens = sample_proposal(model, None, count, generator).tokens  # [N, T]
    texts = potential.texts(tokens)
    for factor in potential.factors:
        log_phi = potential.apply(factor.log_phi, factor.reads, texts, tokens)  # [N]
        row = int(log_phi.argmin())
        one = slice(row, row + 1)
        alone = potential.apply(factor.log_phi, factor.reads, texts[one], tokens[one])[0]
        if not torch.isclose(alone, log_phi[row], 0.05, 0.5):  # bfloat16 differs a little by batch
            numbers = f"is {alone:.3g} alone, {log_phi[row]:.3g} in a batch"
            fault = f"{factor.name}: log phi of {texts[row][-80:]!r} {numbers}"
            raise InputError(f"{fault}; it must be a function of the text")
        if factor.log_prefix is not None:
            check_prefix(potential, factor, tokens, log_phi > -torch.inf)


def check_prefix(
    potential: TextPotential, factor: Factor, tokens: Tensor, is_alive: Tensor
) -> None:
    """`check_potential` for a prefix part, on tokens [N, T]; phi > 0 where is_alive [N]."""
    for t in range(1, tokens.shape[1]):
        begun = tokens[:, :t]  # [N, t]
        log_f = potential.prefix_of(factor, begun)  # [N]
        row = t % len(tokens)
        alone = potential.prefix_of(factor, begun[row : row + 1])[0]
        fault = "" if torch.isclose(alone, log_f[row], 1e-3, 1e-3) else "differs in a batch"
        if (is_killed := (log_f == -torch.inf) & is_alive).any():
            row = is_killed.int().argmax().item()
            fault = "is -inf, but a continuation has phi > 0"
        if fault:
            text = potential.texts(begun[row : row + 1])[0][-80:]
            line = f"{factor.name}: the prefix part of {text!r} {fault}"
            raise InputError(f"{line}; it must be a function of the text, positive where phi is")


def base_potential(log_phi: Callable[[Tensor], Tensor]) -> LogPotential:
    """phi as the sampler takes it in generation 0, where it samples p^(0) itself."""
    return lambda tokens, log_p: log_phi(tokens)


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: LanguageModel) -> LogPotential:
    """phi^(m) (eq. 8): one teacher-forced pass of the base model; log_p [N] is that of p^(m)."""
    return lambda tokens, log_p: sequence_log_probs(base, tokens) + log_phi(tokens) - log_p


def only_zeros(log_prefix: LogPrefix | None) -> LogPrefix | None:
    """A prefix part that is 0 where the given one is, else 1."""
    if log_prefix is None:
        return None

    def log_f(tokens: Tensor) -> Tensor:
        values = log_prefix(tokens)  # [N]
        return values.masked_fill(values > -torch.inf, 0.0)

    return log_f


def seen_from(
    model: BaseModel | Adapted,
    base: BaseModel,
    log_phi: Callable[[Tensor], Tensor],
    is_effective: bool = True,
) -> Sigma:
    """sigma as p^(m) = model sees it: through phi^(m) (eq. 8), which is phi if p^(m) is p^(0).

    Without `is_effective` phi stays as it is, and the target drifts with p^(m). Where p^(m) is not
    p^(0), only the zeros of the prefix part remain: p^(m) has learned the rest, which would count
    twice (measured in docs/results.md). Any f that is positive where phi is leaves Z-hat unbiased.
    """
    if isinstance(log_phi, TextPotential):
        log_phi.check_alike(base)
    log_prefix = getattr(log_phi, "log_prefix", None)
    if model is not base:
        log_prefix = only_zeros(log_prefix)
    if model is base or not is_effective:
        return Sigma(model, base_potential(log_phi), log_prefix)
    return Sigma(model, effective_potential(log_phi, base), log_prefix)
