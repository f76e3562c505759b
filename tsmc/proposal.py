"""The twist-induced proposal q_t, proportional to p(s_t | s_{0:t-1}) psi(s_{1:t}).

    log q_t = log p + log psi - log sum_v (p psi),   the normaliser over the whole vocabulary
    q(s_{1:T}) = prod_t q_t,                         whole sequences, drawn without resampling

A constant added to log psi_t changes no q. N rows, n rows of a slice, T steps, D width, V
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.decoder import counted
from tsmc.categorical import draw_categorical, uniforms
from tsmc.interfaces import Decoder, LanguageModel, Twist, row_slices


@dataclass
class Extension:
    """One proposed token for each row, all [N]. Where psi rules out all, the row has no weight."""

    tokens: Tensor
    log_p: Tensor  # log p(s_t | s_{0:t-1})
    log_psi: Tensor  # log psi(s_{1:t})
    log_q: Tensor  # log q_t(s_t | s_{0:t-1})
    log_normaliser: Tensor  # log sum_v p(v | s_{0:t-1}) psi(s_{1:t-1}, v)


def propose(
    model: LanguageModel, decoder: Decoder, twist: Twist | None, uniform: Tensor
) -> Extension:
    """s_t ~ q_t for every row at uniform numbers [N, 1]."""
    all_tokens = []
    all_numbers = []
    for rows in row_slices(len(uniform), model.vocab_size):
        tilted = decoder.evaluate(model.head, rows)  # [n, V]
        if twist is not None:
            log_p = tilted.log_softmax(-1)  # [n, V]
            log_psi = decoder.evaluate(twist, rows)  # [n, V]
            tilted = log_p + log_psi
        tokens, log_normaliser = draw_categorical(tilted, uniform[rows])  # [n], [n]
        place = tokens[:, None]
        log_q = tilted.gather(1, place).squeeze(1) - log_normaliser  # [n]
        if twist is None:  # q = p, and one normalisation serves both
            zeros = torch.zeros_like(log_q)
            numbers = [log_q, zeros, log_q, zeros]
        else:
            is_dead = log_normaliser == -torch.inf  # then every weight shall be zero
            log_p = log_p.gather(1, place).squeeze(1)  # [n]
            log_psi = log_psi.gather(1, place).squeeze(1).masked_fill(is_dead, 0.0)  # [n]
            numbers = [log_p, log_psi, log_q.masked_fill(is_dead, torch.inf), log_normaliser]
        all_tokens.append(tokens)
        all_numbers.append(torch.stack(numbers))
    log_p, log_psi, log_q, log_normaliser = torch.cat(all_numbers, 1)  # [N] each
    return Extension(torch.cat(all_tokens), log_p, log_psi, log_q, log_normaliser)


def wait(step: Extension, is_finished: Tensor, log_psi: Tensor, end: int) -> Extension:
    """The step, where finished texts [N] only repeat their end, without a change of their weight.

    log_psi [N] is that before the step; it stays, and the normaliser equals it.
    """
    return Extension(
        tokens=step.tokens.masked_fill(is_finished, end),
        log_p=step.log_p.masked_fill(is_finished, 0.0),
        log_psi=torch.where(is_finished, log_psi, step.log_psi),
        log_q=step.log_q.masked_fill(is_finished, 0.0),
        log_normaliser=torch.where(is_finished, log_psi, step.log_normaliser),
    )


@dataclass
class Trajectories:
    """N independent sequences from q, all [N, T], and what the twist saw."""

    tokens: Tensor
    log_p: Tensor  # log p(s_t | s_{0:t-1})
    log_psi: Tensor  # log psi(s_{1:t})
    log_q: Tensor  # log q_t(s_t | s_{0:t-1})
    hidden: Tensor  # [N, T, D]


@torch.no_grad()
def sample_proposal(
    model: LanguageModel,
    twist: Twist | None,
    rows: int,
    generator: torch.Generator,
    part: slice = slice(None),
) -> Trajectories:
    """Draw N = rows sequences i.i.d. from q, without resampling; without a twist from the model.

    Of these rows only a `part` may be computed: each row has uniform numbers of its own, so the
    parts of several processes together are what one process draws.
    """
    uniform = uniforms(model.length * rows, 1, generator).view(-1, rows, 1)[:, part]  # [T, N, 1]
    decoder = model.decoder(uniform.shape[1])
    steps = []
    hidden = []
    is_finished = torch.zeros(uniform.shape[1], dtype=torch.bool, device=uniform.device)  # [N]
    log_psi = torch.zeros((), device=uniform.device)  # [N] from the first step on
    for t in range(model.length):
        hidden.append(decoder.hidden)
        step = propose(model, decoder, twist, uniform[t])
        steps.append(wait(step, is_finished, log_psi, model.end))
        is_finished = steps[-1].tokens == model.end
        log_psi = steps[-1].log_psi
        if t < model.length - 1:
            decoder.extend(steps[-1].tokens)
    return Trajectories(
        tokens=torch.stack([step.tokens for step in steps], 1),
        log_p=torch.stack([step.log_p for step in steps], 1),
        log_psi=torch.stack([step.log_psi for step in steps], 1),
        log_q=torch.stack([step.log_q for step in steps], 1),
        hidden=torch.stack(hidden, 1),
    )


@torch.no_grad()
def proposal_log_probs(
    model: LanguageModel, twist: Twist | None, tokens: Tensor
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


def sequence_log_probs(model: LanguageModel, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) [N] of given sequences tokens [N, T]."""
    return proposal_log_probs(model, None, tokens)[0]
