"""The twist-induced proposal q_t, proportional to p(s_t | s_{0:t-1}) psi(s_{1:t}) (paper, step "Extending", after eq. 6).

    log q_t = log p + log psi - log sum_v (p psi),   the normaliser over the whole vocabulary

A twist is any callable from hidden states [N, D] to log psi [N, V] of every possible next token; None means psi = 1, which
makes q = p. A constant added to log psi_t changes no proposal (a gauge freedom). N rows, m in a chunk; S states, n in a chunk;
T steps, V vocabulary.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tsmc.categorical import draw_categorical
from tsmc.interfaces import Decoder, Twist, chunks


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

    Rows at one state share its q_t. forced [N] gives the token of the rows where it is not negative; their probabilities are
    those of that token.
    """
    pieces, order = [], []
    for part in chunks(len(decoder.states), decoder.vocab_size):
        rows = ((decoder.state_of >= part.start) & (decoder.state_of < part.stop)).nonzero().squeeze(1)  # [m]
        logits = decoder.logits_of(part)  # [n, V]
        log_psi = None if twist is None else twist(decoder.states[part])  # [n, V]
        given = None if forced is None else forced[rows]
        pieces.append(draw(logits, log_psi, decoder.state_of[rows] - part.start, uniform[rows], given))
        order.append(rows)
    if len(pieces) == 1:
        return pieces[0]
    back = torch.cat(order).argsort()  # [N]
    return Extension(*(torch.cat([getattr(piece, item.name) for piece in pieces])[back] for item in fields(Extension)))


def draw(logits: Tensor, log_psi: Tensor | None, state_of: Tensor, uniform: Tensor, forced: Tensor | None) -> Extension:
    """The tokens of m rows at states state_of [m], at uniform numbers [m, 1], from logits of p and log psi, both [n, V]."""
    log_p = logits if log_psi is None else logits.log_softmax(-1)  # logits will do where no psi weighs them
    tilted = log_p if log_psi is None else log_p + log_psi
    tokens, log_normaliser = draw_categorical(tilted, uniform, state_of)  # [m], [m]
    if forced is not None:
        tokens = torch.where(forced >= 0, forced, tokens)
    log_q = tilted[state_of, tokens] - log_normaliser
    if log_psi is None:
        zeros = torch.zeros_like(log_normaliser)
        return Extension(tokens, log_q, zeros, log_q, zeros)
    is_dead = log_normaliser == -torch.inf
    log_psi_token = log_psi[state_of, tokens].masked_fill(is_dead, 0.0)
    log_q = log_q.masked_fill(is_dead, torch.inf)
    return Extension(tokens, log_p[state_of, tokens], log_psi_token, log_q, log_normaliser)
