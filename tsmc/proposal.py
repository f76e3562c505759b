"""The twist-induced proposal q_t, proportional to p(s_t | s_{0:t-1}) psi(s_{1:t}).

    log q_t = log p + log psi - log N_t,   N_t = sum_v (p psi) over the whole vocabulary
    q(s_{1:T}) = prod_t q_t,               whole sequences, drawn without resampling

A constant added to log psi_t changes no q. N rows, n rows of a slice, T steps, D width, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinystories.decoder import Conditional, Decoder, End, counted, is_end, row_slices
from tsmc.draws import draw_categorical, uniforms

DRAWN = -1  # where forced draws of `pooled` give tokens: one that p draws
TREE_PAYS = 0.5  # texts are read token by token up to this share of distinct beginnings
WIDEST = 8  # numbers that a network has in memory for each place, over its width D
Twist = Callable[[Tensor], Tensor]
"""twist(hidden [N, D]) -> log psi [N, V] of every possible next token; None means psi = 1."""


@dataclass
class Extension:
    """One proposed token for each row, all [N]. Where psi rules out all, the row has no weight."""

    tokens: Tensor
    log_p: Tensor  # log p(s_t | s_{0:t-1})
    log_psi: Tensor  # log psi(s_{1:t})
    log_q: Tensor  # log q_t(s_t | s_{0:t-1})
    log_normaliser: Tensor  # log N_t = log sum_v p(v | s_{0:t-1}) psi(s_{1:t-1}, v)


def join(parts: list[Extension], joined: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    """The numbers of several extensions by name, joined."""
    return {name: joined([getattr(part, name) for part in parts]) for name in vars(parts[0])}


def propose(
    model: Conditional,
    twist: Twist | None,
    states: Tensor,
    place: Tensor,
    uniform: Tensor,
    given: Tensor | None = None,
) -> Extension:
    """s_t ~ q_t for n rows at uniform numbers [n, 1], each after its state, number place[n] of
    states [S, D]; where `given` [n] is not DRAWN, that token."""
    tilted = model.head(states)  # [S, V] p psi, in logarithms and up to a constant
    if twist is not None:
        log_p = tilted.log_softmax(-1)  # [S, V]
        log_psi = twist(states)  # [S, V]
        tilted = log_p + log_psi
    tokens, log_normaliser = draw_categorical(tilted, uniform, place)  # [n], [n] log N_t
    if given is not None:
        tokens = tokens.where(given == DRAWN, given)
    log_q = tilted[place, tokens] - log_normaliser  # [n]
    if twist is None:  # q_t = p, N_t = 1
        zeros = torch.zeros_like(log_q)
        return Extension(tokens, log_q, zeros, log_q, zeros)
    log_p, log_psi = log_p[place, tokens], log_psi[place, tokens]  # [n], [n]
    is_dead = log_normaliser == -torch.inf  # then every weight shall be zero
    log_psi, log_q = log_psi.masked_fill(is_dead, 0.0), log_q.masked_fill(is_dead, torch.inf)
    return Extension(tokens, log_p, log_psi, log_q, log_normaliser)


def extend(
    model: Conditional,
    decoder: Decoder,
    twist: Twist | None,
    uniform: Tensor,
    given: Tensor | None = None,
    other_head: Twist | None = None,
) -> Extension:
    """`propose` for every row of a decoder at uniform numbers [N, 1].

    Where q is a model of its own, without a twist, log_p may be that of another head on the same
    states: `other_head` makes its logits [S, V]. Only `pooled` gives tokens or a head.
    """
    parts, numbers = [], []
    # Slices of the distinct states, the rows that have one of them, and which one.
    for states, rows, place in decoder.distinct():
        own = None if given is None else given[rows]
        part = propose(model, twist, states, place, uniform[rows], own)
        if other_head is not None:
            part.log_p = other_head(states).log_softmax(-1)[place, part.tokens]
        parts.append(part)
        numbers.append(rows)
    back = torch.cat(numbers).argsort()  # [N] where each row is among the parts
    return Extension(**join(parts, lambda tensors: torch.cat(tensors)[back]))


def wait(step: Extension, before: Tensor, log_psi: Tensor, end: End) -> Extension:
    """The step, where finished texts only repeat their end, without a change of their weight.

    before [N] are the last tokens, and log_psi [N] is that before the step; in finished texts it
    stays, and the normaliser equals it.
    """
    is_finished = is_end(before, end)  # [N]
    return Extension(
        tokens=torch.where(is_finished, before, step.tokens),
        log_p=step.log_p.masked_fill(is_finished, 0.0),
        log_psi=torch.where(is_finished, log_psi, step.log_psi),
        log_q=step.log_q.masked_fill(is_finished, 0.0),
        log_normaliser=torch.where(is_finished, log_psi, step.log_normaliser),
    )


@dataclass
class Trajectories(Extension):
    """N independent sequences from q: the same of every step, all [N, T], and what psi saw."""

    hidden: Any  # [N, T, D]; None without psi


@torch.no_grad()
def walk(
    model: Conditional,
    twist: Twist | None,
    uniform: Tensor,
    given: Tensor | None = None,
    other_head: Twist | None = None,
) -> Trajectories:
    """Sequences token by token, as `extend` has it, at uniform numbers [N, T]; without resampling.

    What is given [N, T] behind the end of a text is not written.
    """
    decoder = model.decoder(len(uniform))
    steps, hidden = [], []
    for t in range(uniform.shape[1]):
        if t > 0:
            decoder.append(steps[-1].tokens)
        if twist is not None:
            hidden.append(decoder.hidden)
        own = None if given is None else given[:, t]
        step = extend(model, decoder, twist, uniform[:, t, None], own, other_head)
        if t > 0:
            step = wait(step, steps[-1].tokens, steps[-1].log_psi, model.end)
        steps.append(step)
    stack = partial(torch.stack, dim=1)
    return Trajectories(**join(steps, stack), hidden=stack(hidden) if hidden else None)


def sample_proposal(
    model: Conditional,
    twist: Twist | None,
    rows: int,
    generator: torch.Generator,
    part: slice = slice(None),
    other_head: Twist | None = None,
) -> Trajectories:
    """Draw N = rows sequences i.i.d. from q, without resampling; without a twist from the model.

    Of these rows only a `part` may be computed: each row has uniform numbers of its own, so the
    parts of several processes together are what one process draws. `other_head` is as in `extend`.
    """
    uniform = uniforms(model.length, rows, generator).T[part]  # [N, T]
    return walk(model, twist, uniform, other_head=other_head)


@torch.no_grad()
def proposal_log_probs(
    model: Conditional, twist: Twist | None, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """log p(s_{1:T}) and log q(s_{1:T}), both [N], of given sequences tokens [N, T]."""
    all_log_p, all_log_q = [], []
    # Memory holds the states of many texts at a time, and the logits of few.
    for rows in row_slices(tokens, WIDEST * model.width * tokens.shape[1]):
        states = model.states(tokens[rows]).flatten(0, 1)  # [n T, D]
        given = tokens[rows].flatten()[:, None]  # [n T, 1]
        for some in row_slices(states, model.vocab_size):
            log_p = model.head(states[some]).log_softmax(-1)  # [m, V]
            all_log_p.append(log_p.gather(1, given[some]))
            if twist is not None:
                tilted = log_p + twist(states[some])  # [m, V]
                is_ruled_out = tilted.gather(1, given[some]) == -torch.inf
                log_q = tilted.log_softmax(-1).gather(1, given[some])
                all_log_q.append(log_q.masked_fill(is_ruled_out, -torch.inf))
    is_counted = counted(tokens, model.end)  # [N, T]
    each = [torch.cat(parts).view_as(tokens) for parts in (all_log_p, all_log_q or all_log_p)]
    log_p, log_q = (log_probs.where(is_counted, 0.0).sum(-1) for log_probs in each)
    return log_p, log_q


@torch.no_grad()
def sequence_log_probs(model: Conditional, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) [N] of given sequences tokens [N, T].

    Where texts share beginnings, as the particles of runs that have resampled do, they are read
    token by token, each beginning once; else a single pass over all positions is faster.
    """
    texts, text = tokens.unique(dim=0, return_inverse=True)  # [S, T], [N]
    # Three quarters of a text tell whether the copies of resampling still show.
    beginnings = texts[:, : max(1, tokens.shape[1] * 3 // 4)].unique_consecutive(dim=0)
    if len(beginnings) > TREE_PAYS * len(tokens):
        return proposal_log_probs(model, None, texts)[0][text]
    uniform = torch.zeros_like(texts)  # nothing is drawn
    return walk(model, None, uniform, texts).log_p.sum(1)[text]
