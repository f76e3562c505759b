"""The twist-induced proposal q_t, proportional to p(s_t | s_{0:t-1}) psi(s_{1:t}) (paper, step "Extending", after eq. 6).

    log q_t = log p + log psi - log sum_v (p psi),   the normaliser over the whole vocabulary

A twist is any callable from hidden states [N, D] to log psi [N, V] of every possible next token; None means psi = 1, which
makes q = p. Adding a constant to log psi_t changes no proposal (a gauge freedom). Rows are worked on in chunks, so that
memory is bounded however many there are. N rows, n rows of a chunk, T steps, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from tsmc.categorical import draw_categorical, uniforms

Twist = Callable[[Tensor], Tensor]
MAX_LOGITS = 2**24  # entries of one tensor of logits: 64 MB in float32


class Decoder(Protocol):
    """N continuations, token by token (`tinystories.Decoder`, or a table of conditional probabilities)."""

    hidden: Tensor  # [N, D]
    vocab_size: int

    def logits_of(self, rows: slice) -> Tensor: ...  # [n, V]

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None: ...


class LanguageModel(Protocol):
    """p(s_{1:T} | s_0) after a fixed prompt (`tinystories.Conditional`, or a table)."""

    length: int
    vocab_size: int

    def decoder(self, rows: int) -> Decoder: ...

    def log_probs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass
class Extension:
    """One proposed token for each row, all [N].

    Where psi rules out every token, log_normaliser is -inf, log_psi 0 and log_q +inf: every weight of that row is zero.
    """

    tokens: Tensor
    log_p: Tensor  # log p(s_t | s_{0:t-1})
    log_psi: Tensor  # log psi(s_{1:t})
    log_q: Tensor  # log q_t(s_t | s_{0:t-1})
    log_normaliser: Tensor  # log sum_v p(v | s_{0:t-1}) psi(s_{1:t-1}, v)

    def view(self, shape: tuple[int, ...]) -> "Extension":
        """The same with its rows laid out as [R, K]."""
        return Extension(**{name: values.view(shape) for name, values in vars(self).items()})


def propose(decoder: Decoder, twist: Twist | None, uniform: Tensor, forced: Tensor | None = None) -> Extension:
    """Draw s_t ~ q_t for every row at uniform numbers [N, 1]: one language-model step and one twist step are paid for.

    forced [N] gives the token of the rows where it is not negative; their probabilities are those of that token.
    """
    pieces = []
    for rows in chunks(len(uniform), decoder.vocab_size):
        logits = decoder.logits_of(rows)  # [n, V]
        log_psi = None if twist is None else log_psi_of(twist, decoder.hidden[rows])  # [n, V]
        log_p = logits if log_psi is None else logits.log_softmax(-1)  # logits will do where no psi weighs them
        tilted = log_p if log_psi is None else log_p + log_psi
        tokens, log_normaliser = draw_categorical(tilted, uniform[rows])  # [n], [n]
        if forced is not None:
            tokens = torch.where(forced[rows] >= 0, forced[rows], tokens)
        log_q = at_tokens(tilted, tokens) - log_normaliser
        if log_psi is None:
            zeros = torch.zeros_like(log_normaliser)
            pieces.append(Extension(tokens, log_q, zeros, log_q, zeros))
            continue
        is_dead = log_normaliser == -torch.inf
        log_psi_token = at_tokens(log_psi, tokens).masked_fill(is_dead, 0.0)
        log_q = log_q.masked_fill(is_dead, torch.inf)
        pieces.append(Extension(tokens, at_tokens(log_p, tokens), log_psi_token, log_q, log_normaliser))
    if len(pieces) == 1:
        return pieces[0]
    return Extension(*(torch.cat([getattr(piece, item.name) for piece in pieces]) for item in fields(Extension)))


def at_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """Entries [n] of values [n, V] at tokens [n]."""
    return values.gather(-1, tokens[:, None]).squeeze(-1)


def chunks(rows: int, entries: int) -> Iterator[slice]:
    """Slices of range(rows) of so few rows that `entries` numbers for each stay within MAX_LOGITS; at least one slice."""
    size = max(1, MAX_LOGITS // entries)
    return (slice(start, min(rows, start + size)) for start in range(0, max(1, rows), size))


def log_psi_of(twist: Twist, hidden: Tensor) -> Tensor:
    """log psi [n, V] after hidden states [n, D]; computed once where all rows are one, as at the first step."""
    return twist(hidden[:1]).expand(len(hidden), -1) if hidden.stride(0) == 0 else twist(hidden)


@dataclass
class Trajectories:
    """N independent sequences from q, [N, T] each, and the hidden states [N, T, D] that the twist saw."""

    tokens: Tensor
    log_p: Tensor
    log_psi: Tensor
    log_q: Tensor
    hidden: Tensor | None


def sample_proposal(
    model: LanguageModel, twist: Twist | None, rows: int, generator: torch.Generator, keep_hidden: bool = False
) -> Trajectories:
    """Draw N = rows sequences i.i.d. from q, without resampling; twist None samples the model itself."""
    return trajectories(model, twist, uniforms(model.length * rows, 1, generator).view(-1, rows, 1), keep_hidden)


@torch.no_grad()
def trajectories(model: LanguageModel, twist: Twist | None, uniform: Tensor, keep_hidden: bool) -> Trajectories:
    """The N sequences of q that uniform numbers [T, N, 1] stand for; a row of them depends on no other row."""
    decoder = model.decoder(uniform.shape[1])
    steps, hidden = [], []
    for t in range(model.length):
        if keep_hidden:
            hidden.append(decoder.hidden)
        steps.append(propose(decoder, twist, uniform[t]))
        if t < model.length - 1:
            decoder.extend(steps[-1].tokens)
    names = ("tokens", "log_p", "log_psi", "log_q")
    stacked = {name: torch.stack([getattr(step, name) for step in steps], 1) for name in names}  # [N, T] each
    return Trajectories(**stacked, hidden=torch.stack(hidden, 1) if keep_hidden else None)


@torch.no_grad()
def sequence_log_probs(model: LanguageModel, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) [N] of given sequences tokens [N, T], by teacher forcing."""
    entries = model.vocab_size * tokens.shape[1]
    return torch.cat([model.log_probs(tokens[rows])[0].sum(-1) for rows in chunks(len(tokens), entries)])


@torch.no_grad()
def proposal_log_probs(model: LanguageModel, twist: Twist | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log p(s_{1:T}) and log q(s_{1:T}), both [N], of given sequences tokens [N, T], by teacher forcing.

    log q is -inf for a sequence that the twist rules out at any step.
    """
    if twist is None:
        log_p = sequence_log_probs(model, tokens)
        return log_p, log_p
    parts = []
    for rows in chunks(len(tokens), model.vocab_size * tokens.shape[1]):
        log_p, logits, hidden = model.log_probs(tokens[rows])
        tilted = logits + twist(hidden)  # [n, T, V]
        chosen = tilted.gather(-1, tokens[rows, :, None]).squeeze(-1)  # [n, T]
        ruled_out = chosen == -torch.inf
        log_q = (chosen - tilted.logsumexp(-1)).masked_fill(ruled_out, -torch.inf)
        parts.append(torch.stack([log_p.sum(-1), log_q.sum(-1)]))
    log_p, log_q = torch.cat(parts, 1)
    return log_p, log_q
