"""What the samplers, the losses and the learners are given: p, psi, phi and a callback.

N rows, R runs, K particles, T steps, D width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from tinystories.decoder import Autoregressive

MAX_LOGITS = 2**22  # entries of one tensor of logits: 16 MB in float32, of which a few are alive
Twist = Callable[[Tensor], Tensor]
"""twist(hidden [N, D]) -> log psi [N, V] of every possible next token; None means psi = 1."""
LogPotential = Callable[[Tensor, Tensor], Tensor]
"""log_potential(tokens [N, T], log_p [N]) -> log phi [N].

log_p = log p(s_{1:T}) is passed because effective potentials divide by it (eq. 8).
"""
LogPrefix = Callable[[Tensor], Tensor]
"""log_prefix(tokens [N, t]) -> log f_t [N] of unfinished sequences, t < T; None means f = 1."""
Report = Callable[..., None]
"""report(word, m, steps, **figures) is called in each of so many steps of what the word names."""


def ignore(word: str, m: int | None, steps: int, **figures: float | Tensor) -> None:
    """The default report: does nothing."""


class Decoder(Protocol):
    """N continuations, token by token."""

    @property
    def hidden(self) -> Tensor: ...  # [N, D]
    def evaluate(self, network: Callable[[Tensor], Tensor], rows: slice) -> Tensor: ...  # [n, .]
    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None: ...


class LanguageModel(Autoregressive, Protocol):
    """p(s_{1:T} | s_0) after a fixed prompt, as the samplers use it."""

    length: int
    vocab_size: int

    def decoder(self, rows: int) -> Decoder: ...


class BaseModel(LanguageModel, Protocol):
    """p^(0), as the learners use it (`tinystories.Conditional` or `AnyModel`)."""

    network: nn.Module  # what fine-tuning trains

    @property
    def output_embeddings(self) -> Tensor: ...  # [V, D]; logits = hidden output_embeddings^T
    def with_network(self, network: nn.Module) -> Self: ...  # another network, the same prompt


class LearnableTwist(Protocol):
    """A twist with parameters; `of_tokens` gives log psi of chosen tokens, with gradient."""

    def __call__(self, hidden: Tensor) -> Tensor: ...  # [N, D] -> [N, V]
    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor: ...  # [K, T, D] -> [K, T]


def call_potential(log_phi: Callable[..., Tensor], tokens: Tensor, *log_p: Tensor) -> Tensor:
    """log phi [N] of tokens [N, T], given as a copy, and of log_p [N] where it is given."""
    values = log_phi(tokens.clone(), *log_p)
    assert values.shape == tokens.shape[:1], "log phi must be a tensor with a number for each text"
    assert values.dtype != torch.bool, "log phi is true or false; return 0 for true, -inf for false"
    return values


def row_slices(rows: int, entries: int) -> Iterator[slice]:
    """Slices of range(rows), at least one, with `entries` numbers a row within MAX_LOGITS."""
    size = max(1, MAX_LOGITS // entries)
    return (slice(start, min(rows, start + size)) for start in range(0, max(1, rows), size))
