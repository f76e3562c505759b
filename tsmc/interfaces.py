"""What the samplers and the losses are given.

    LanguageModel    p(s_{1:T} | s_0), which opens a Decoder of N continuations
    Twist            log psi; with parameters, a LearnableTwist
    LogPotential     log phi
    Observer         a callback invoked at every step of the sampler
    Report           a callback invoked at every step of a training loop

N rows, R runs, K particles, T steps, D width, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from tsmc.sampler import Step

MAX_LOGITS = 2**26  # entries of one tensor of logits: 256 MB in float32
Twist = Callable[[Tensor], Tensor]
"""twist(hidden [N, D]) -> log psi [N, V] of every possible next token; None means psi = 1."""
LogPotential = Callable[[Tensor, Tensor], Tensor]
"""log_potential(tokens [N, T], log_p [N]) -> log phi [N].

log_p = log p(s_{1:T}) is passed because effective potentials divide by it (eq. 8).
"""
Observer = Callable[["Step"], None]
"""observer(step) is called at every step, before resampling takes effect. The tensors are the
sampler's own: copy what is kept and change nothing."""
Report = Callable[..., None]
"""report(**figures) is called once for each step of a training loop, before the step is taken."""


def ignore(**figures: float | Tensor) -> None:
    """The default report: does nothing."""


class Decoder(Protocol):
    """N continuations, token by token."""

    @property
    def hidden(self) -> Tensor: ...  # [N, D]

    def evaluate(self, network: Callable[[Tensor], Tensor], rows: slice) -> Tensor: ...  # [n, .]

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
    """A twist with parameters; `of_tokens` gives log psi of chosen tokens, with gradient."""

    def __call__(self, hidden: Tensor) -> Tensor: ...  # [..., D] -> [..., V]

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor: ...  # [K, T, D] -> [K, T]


def row_slices(rows: int, entries: int) -> Iterator[slice]:
    """Slices of range(rows), so short that `entries` numbers a row stay within MAX_LOGITS.

    There is at least one slice, so that loops over them return empty tensors for no rows.
    """
    size = max(1, MAX_LOGITS // entries)
    return (slice(start, min(rows, start + size)) for start in range(0, max(1, rows), size))
