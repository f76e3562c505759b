"""The twist-induced proposal q_t, proportional to p(s_t | s_{0:t-1}) psi(s_{1:t}).

    log q_t = log p + log psi - log N_t,   N_t = sum_v (p psi) over the whole vocabulary
    q(s_{1:T}) = prod_t q_t,               whole sequences, drawn without resampling

A constant added to log psi_t changes no q. N rows, n rows of a slice, T steps, D width, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinystories.decoder import Conditional, Decoder, End, counted, is_end, row_slices
from tsmc.draws import draw_categorical, uniforms

DRAWN = -1  # in place of a token that is given: p draws this one
TREE_PAYS = 0.5  # up to this share of distinct beginnings, reading token by token is faster
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


def extend(
    model: Conditional,
    decoder: Decoder,
    twist: Twist | None,
    uniform: Tensor,
    reference: Twist | None = None,
) -> Extension:
    """s_t ~ q_t for every row at uniform numbers [N, 1].

    Where q is a model of its own, without a twist, log_p may be that of another head on the same
    states: `reference` makes its logits [N, V].
    """
    all_tokens, all_numbers = [], []
    for rows in row_slices(len(uniform), model.vocab_size):
        states, place = decoder.distinct(rows)  # [S, D], [n]
        tilted = model.head(states)  # [S, V]
        if twist is not None:
            log_p = tilted.log_softmax(-1)  # [S, V]
            log_psi = twist(states)  # [S, V]
            tilted = log_p + log_psi
        tokens, log_normaliser = draw_categorical(tilted, uniform[rows], place)  # [n], [n]
        log_q = tilted[place, tokens] - log_normaliser  # [n]
        if twist is None:  # q = p, and one normalisation serves both
            zeros = torch.zeros_like(log_q)
            numbers = [log_q, zeros, log_q, zeros]
        else:
            is_dead = log_normaliser == -torch.inf  # then every weight shall be zero
            log_psi = log_psi[place, tokens].masked_fill(is_dead, 0.0)  # [n]
            log_q = log_q.masked_fill(is_dead, torch.inf)
            numbers = [log_p[place, tokens], log_psi, log_q, log_normaliser]
        if reference is not None:
            numbers[0] = reference(states).log_softmax(-1)[place, tokens]  # [n]
        all_tokens.append(tokens)
        all_numbers.append(torch.stack(numbers))
    log_p, log_psi, log_q, log_normaliser = torch.cat(all_numbers, 1)  # [N] each
    return Extension(torch.cat(all_tokens), log_p, log_psi, log_q, log_normaliser)


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
def sample_proposal(
    model: Conditional,
    twist: Twist | None,
    rows: int,
    generator: torch.Generator,
    part: slice = slice(None),
    reference: Twist | None = None,
) -> Trajectories:
    """Draw N = rows sequences i.i.d. from q, without resampling; without a twist from the model.

    Of these rows only a `part` may be computed: each row has uniform numbers of its own, so the
    parts of several processes together are what one process draws. `reference` is as in `extend`.
    """
    uniform = uniforms(model.length * rows, 1, generator).view(-1, rows, 1)[:, part]  # [T, N, 1]
    decoder = model.decoder(uniform.shape[1])
    steps, hidden = [], []
    for t in range(model.length):
        if twist is not None:
            hidden.append(decoder.hidden)
        step = extend(model, decoder, twist, uniform[t], reference)
        if t > 0:
            step = wait(step, steps[-1].tokens, steps[-1].log_psi, model.end)
        steps.append(step)
        if t < model.length - 1:
            decoder.append(step.tokens)
    columns = {}
    for name in vars(steps[0]):
        columns[name] = torch.stack([vars(step)[name] for step in steps], 1)  # [N, T]
    return Trajectories(**columns, hidden=torch.stack(hidden, 1) if hidden else None)


@torch.no_grad()
def proposal_log_probs(
    model: Conditional, twist: Twist | None, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """log p(s_{1:T}) and log q(s_{1:T}), both [N], of given sequences tokens [N, T]."""
    all_log_p, all_log_q = [], []
    for rows in row_slices(len(tokens), model.vocab_size * tokens.shape[1]):
        log_p, logits, hidden = model.log_probs(tokens[rows])
        log_q = log_p
        if twist is not None:
            tilted = logits + twist(hidden)  # [n, T, V]
            chosen = tilted.gather(-1, tokens[rows, :, None]).squeeze(-1)  # [n, T]
            log_q = chosen - tilted.logsumexp(-1)
            log_q = log_q.masked_fill(chosen == -torch.inf, -torch.inf)  # psi rules it out
            log_q = log_q.where(counted(tokens[rows], model.end), 0.0)
        all_log_p.append(log_p.sum(-1))
        all_log_q.append(log_q.sum(-1))
    return torch.cat(all_log_p), torch.cat(all_log_q)


@torch.no_grad()
def sequence_log_probs(model: Conditional, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) [N] of given sequences tokens [N, T].

    Where texts share beginnings, as the particles of runs that have resampled do, they are read
    token by token, each beginning once; else a single pass over all positions is faster.
    """
    texts, text = tokens.unique(dim=0, return_inverse=True)  # [S, T], [N]
    late = texts[:, : max(1, tokens.shape[1] * 3 // 4)].unique_consecutive(dim=0)
    if len(late) > TREE_PAYS * len(tokens):
        return proposal_log_probs(model, None, tokens)[0]
    return complete(model, texts, None)[1].sum(1)[text]


@torch.no_grad()
def complete(model: Conditional, given: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Texts [N, T] with the tokens that are given and those that p draws, and their log p [N, T].

    p draws where given [N, T] is DRAWN, at uniform numbers [N, T], which may be left out where all
    tokens are given. What is given behind the end of a text is not written.
    """
    columns: list[Tensor] = []  # t of [N]
    all_log_p = []
    decoder = model.decoder(len(given))
    for t in range(given.shape[1]):
        tokens = given[:, t]  # [N]
        if t > 0:
            decoder.append(columns[-1])
            tokens = torch.where(is_end(columns[-1], model.end), columns[-1], tokens)
        chosen, log_p = [], []
        for rows in row_slices(len(given), model.vocab_size):
            states, place = decoder.distinct(rows)  # [S, D], [n]
            logits = model.head(states)  # [S, V]
            if uniform is None:
                chosen.append(tokens[rows])
                log_normaliser = logits.logsumexp(-1)[place]  # [n]
            else:
                drawn, log_normaliser = draw_categorical(logits, uniform[rows, t, None], place)
                chosen.append(drawn.where(tokens[rows] == DRAWN, tokens[rows]))
            log_p.append(logits[place, chosen[-1]] - log_normaliser)
        columns.append(torch.cat(chosen))
        all_log_p.append(torch.cat(log_p))
    texts = torch.stack(columns, 1)  # [N, T]
    return texts, torch.stack(all_log_p, 1).where(counted(texts, model.end), 0.0)
