"""What the samplers and the losses are given. N rows; S states, n in a chunk; R runs, K particles, T steps,
D width, V vocabulary.

    LanguageModel    p(s_{1:T} | s_0), which opens a Decoder for N continuations
    Twist            log psi; with parameters a LearnableTwist
    LogPotential     log phi
    Observer         somebody who looks on

Logits are made in chunks, so that they take bounded memory however many rows there are.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from tsmc.sampler import Particles

MAX_LOGITS = 2**24  # entries of one tensor of logits: 64 MB in float32
Twist = Callable[[Tensor], Tensor]
"""twist(hidden [N, D]) -> log psi [N, V] of every possible next token; None in its place means psi = 1."""
LogPotential = Callable[[Tensor, Tensor], Tensor]
"""log_potential(tokens [N, T], log_p [N]) -> log phi [N]; log_p = log p(s_{1:T}), which effective potentials divide out."""
Observer = Callable[["Particles", Tensor], None]
"""observer(particles, ancestors [R, K]) sees every step before its resampling takes effect. The tensors are the sampler's
own: copy what is kept, change nothing."""


class Decoder(Protocol):
    """N continuations, token by token (`tinystories.Decoder`, or a table of conditional probabilities).

    Row n stands at state state_of[n], one of S; rows whose texts are equal may share theirs.
    """

    states: Tensor  # [S, D]
    state_of: Tensor  # [N]
    vocab_size: int

    def logits_of(self, part: slice) -> Tensor: ...  # [n, V] of the n states in a slice

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None: ...


class LanguageModel(Protocol):
    """p(s_{1:T} | s_0) after a fixed prompt (`tinystories.Conditional`, or a table)."""

    length: int
    vocab_size: int

    def decoder(self, rows: int) -> Decoder: ...

    def head(self, hidden: Tensor) -> Tensor: ...  # [..., D] -> logits [..., V]

    def states(self, tokens: Tensor) -> Tensor: ...  # [N, T] -> hidden [N, T, D]

    def log_probs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class LearnableTwist(Protocol):
    """A twist with parameters; `of_tokens(hidden [K, T, D], tokens [K, T]) -> log psi [K, T]` carries the gradient."""

    def __call__(self, hidden: Tensor) -> Tensor: ...

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor: ...


def chunks(rows: int, entries: int) -> Iterator[slice]:
    """Slices of range(rows) of so few rows that `entries` numbers for each stay within MAX_LOGITS; at least one slice."""
    size = max(1, MAX_LOGITS // entries)
    return (slice(start, min(rows, start + size)) for start in range(0, max(1, rows), size))
