"""The twist-induced proposal q_t, proportional to p(s_t | s_{0:t-1}) psi(s_{1:t}) (paper, step "Extending", after eq. 6).

    log q_t = log p + log psi - log sum_v (p psi),   the normaliser over the whole vocabulary

A twist is any callable from hidden states [N, D] to log psi [N, V] of every possible next token; None means psi = 1, which
makes q = p. A constant added to log psi_t changes no proposal (a gauge freedom). N rows, n in a chunk, T steps, V vocabulary.
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


def log_psi_of(twist: Twist, hidden: Tensor) -> Tensor:
    """log psi [n, V] after hidden states [n, D]; computed once where all rows are one, as at the first step."""
    return twist(hidden[:1]).expand(len(hidden), -1) if hidden.stride(0) == 0 else twist(hidden)
