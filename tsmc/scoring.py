"""What a model and its proposal make of given sequences, by teacher forcing: log p(s_{1:T}) and log q(s_{1:T}).

q is the product of the proposal's factors, without resampling. N rows, n rows of a chunk, T steps, V vocabulary.
"""

import torch
from torch import Tensor

from tsmc.interfaces import LanguageModel, Twist, chunks


@torch.no_grad()
def sequence_log_probs(model: LanguageModel, tokens: Tensor) -> Tensor:
    """log p(s_{1:T}) [N] of given sequences tokens [N, T], by teacher forcing."""
    entries = model.vocab_size * tokens.shape[1]
    return torch.cat([model.log_probs(tokens[rows])[0].sum(-1) for rows in chunks(len(tokens), entries)])


@torch.no_grad()
def token_log_probs(model: LanguageModel, twist: Twist | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log p(s_t | s_{0:t-1}) and log q_t(s_t), both [N, T], of given sequences tokens [N, T], by teacher forcing.

    log q_t is -inf for a token that the twist rules out.
    """
    parts = []
    for rows in chunks(len(tokens), model.vocab_size * tokens.shape[1]):
        log_p, logits, hidden = model.log_probs(tokens[rows])
        log_q = log_p
        if twist is not None:
            tilted = logits + twist(hidden)  # [n, T, V]
            chosen = tilted.gather(-1, tokens[rows, :, None]).squeeze(-1)  # [n, T]
            log_q = (chosen - tilted.logsumexp(-1)).masked_fill(chosen == -torch.inf, -torch.inf)
        parts.append(torch.stack([log_p, log_q]))
    log_p, log_q = torch.cat(parts, 1)
    return log_p, log_q


def proposal_log_probs(model: LanguageModel, twist: Twist | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log p(s_{1:T}) and log q(s_{1:T}), both [N], of given sequences tokens [N, T]."""
    log_p, log_q = token_log_probs(model, twist, tokens)
    return log_p.sum(-1), log_q.sum(-1)
