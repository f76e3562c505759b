"""The twist-induced proposal q_t, proportional to p(s_t | s_{0:t-1}) psi(s_{1:t}).

    log q_t = log p + log psi - log N_t,   N_t = sum_v (p psi) over the whole vocabulary
    q(s_{1:T}) = prod_t q_t,               whole sequences, drawn without resampling

N rows, n rows of a slice, S shared states, T steps, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinystories.decoder import Conditional, Decoder, row_slices
from tsmc.draws import draw_categorical, uniforms
from tsmc.streams import joined, num_workers, side_by_side

WIDEST = 8  # numbers that a network has in memory for each token, over its width D
Twist = Callable[[Tensor], Tensor]
"""twist(hidden [N, D]) -> log psi [N, V] of every possible next token; None means psi = 1."""


@dataclass
class Drawn:
    """One token for each row, drawn from q_t, all [N]; of whole sequences, all [N, T]."""

    tokens: Tensor
    log_p: Tensor  # log p(s_t | s_{0:t-1})
    log_psi: Tensor  # log psi(s_{1:t})
    log_q: Tensor  # log q_t(s_t | s_{0:t-1})
    log_normaliser: Tensor  # log N_t = log sum_v p(v | s_{0:t-1}) psi(s_{1:t-1}, v)
    hidden: Any = None  # h_{t-1} [N, T, D] of whole sequences, what psi saw; None without psi


def extend(model: Conditional, decoder: Decoder, twist: Twist | None, uniform: Tensor) -> Drawn:
    """s_t ~ q_t for every row, at uniform [N, 1]; log q_t is infinite where psi rules all out."""
    parts, order = [], []
    for hidden, rows, index in decoder.slices():  # [S, D], [n], [n]
        tilted = model.head(hidden)  # [S, V] p psi, in logarithms and up to a constant
        if twist is not None:
            log_p = tilted.log_softmax(-1)  # [S, V]
            log_psi = twist(hidden)  # [S, V]
            tilted = log_p + log_psi
        tokens, log_normaliser = draw_categorical(tilted, uniform[rows], index)  # [n], [n]
        log_q = tilted[index, tokens] - log_normaliser  # [n]
        if twist is None:  # q_t = p, N_t = 1
            zeros = torch.zeros_like(log_q)
            parts.append((tokens, log_q, zeros, log_q, zeros))
        else:
            is_dead = log_normaliser == -torch.inf  # [n]
            log_q = log_q.masked_fill(is_dead, torch.inf)
            log_psi_drawn = log_psi[index, tokens].masked_fill(is_dead, 0.0)  # [n]
            parts.append((tokens, log_p[index, tokens], log_psi_drawn, log_q, log_normaliser))
        order.append(rows)
    if len(parts) == 1:  # the rows are in their order
        return Drawn(*parts[0])
    back = torch.cat(order).argsort()  # [N] where each row is among the parts
    return Drawn(*(torch.cat(column)[back] for column in zip(*parts, strict=True)))


def sample_proposal(
    model: Conditional, twist: Twist | None, rows: int, generator: torch.Generator
) -> Drawn:
    """Draw N = rows sequences i.i.d. from q, without resampling; without a twist from the model."""
    uniform = uniforms(model.length, rows, generator).T  # [N, T]
    parts = uniform.chunk(num_workers(uniform.device))  # a whole batch is faster on one core
    written = side_by_side(partial(write, model, twist), parts, uniform.device)
    return joined(list(written), uniform.device)


@torch.no_grad()
def write(model: Conditional, twist: Twist | None, uniform: Tensor) -> Drawn:
    """Sequences of q at uniform numbers [N, T]."""
    decoder = Decoder(model, len(uniform))
    steps, hidden = [], []
    for t in range(model.length):
        if t > 0:
            decoder.append(steps[-1].tokens)
        if twist is not None:
            hidden.append(decoder.hidden)
        steps.append(extend(model, decoder, twist, uniform[:, t, None]))
    names = ("tokens", "log_p", "log_psi", "log_q", "log_normaliser")
    columns = {name: torch.stack([getattr(step, name) for step in steps], 1) for name in names}
    return Drawn(**columns, hidden=torch.stack(hidden, 1) if hidden else None)


def proposal_log_probs(model: Conditional, twist: Twist | None, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) and log q(s_{1:T}) [2, N] of sequences tokens [N, T]."""
    # Memory holds the states of many texts at a time, and the logits of few.
    few = [tokens[rows] for rows in row_slices(tokens, WIDEST * model.width * tokens.shape[1])]
    return torch.cat(list(side_by_side(partial(read, model, twist), few, tokens.device))).T


@torch.no_grad()
def read(model: Conditional, twist: Twist | None, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) and log q(s_{1:T}) [n, 2] of a slice of the sequences [n, T]."""
    hidden = model.hidden(tokens).flatten(0, 1)  # [n T, D]
    nexts = tokens.flatten()[:, None]  # [n T, 1]
    parts = []
    for some in row_slices(hidden, model.vocab_size):
        log_p = model.head(hidden[some]).log_softmax(-1)  # [m, V]
        of_p = of_q = log_p.gather(1, nexts[some])  # [m, 1]
        if twist is not None:
            tilted = log_p + twist(hidden[some])  # [m, V]
            is_never = tilted.gather(1, nexts[some]) == -torch.inf
            of_q = tilted.log_softmax(-1).gather(1, nexts[some]).masked_fill(is_never, -torch.inf)
        parts.append(torch.cat([of_p, of_q], 1))
    return torch.cat(parts).view(*tokens.shape, 2).sum(1)


def sequence_log_probs(model: Conditional, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) [N] of sequences tokens [N, T], each distinct one read once."""
    texts, text = tokens.unique(dim=0, return_inverse=True)  # [S, T], [N]
    return proposal_log_probs(model, None, texts)[0][text]
