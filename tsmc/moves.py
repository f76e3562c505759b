"""Metropolis-Hastings moves, which separate equal particles (Gilks & Berzuini, 2001).

    t uniform in 0..T-1,   s'_{1:t} = s_{1:t},   s'_{t+1:T} ~ q( . | s_{1:t})
    s' replaces s with probability min(1, v_t(s') / v_t(s)),
    v_t(s) = phi(s) prod_{u > t} p(s_u | s_{0:u-1}) / q_u(s_u)

t and the tokens up to t are the same for the reverse move, so this is a Metropolis-Hastings step
for sigma, proportional to p phi, whatever q is. A move costs a little more than drawing and scoring
its particle. N sequences, T tokens.
"""

import torch
from torch import Tensor

from tsmc.categorical import uniforms
from tsmc.interfaces import Twist
from tsmc.proposal import DRAWN, sample_proposal, token_log_probs
from tsmc.sampler import Sigma


@torch.no_grad()
def move(
    sigma: Sigma,
    twist: Twist | None,
    tokens: Tensor,
    log_phi: Tensor,
    times: int,
    generator: torch.Generator,
) -> Tensor:
    """Apply `times` moves to every row of tokens [N, T], whose log phi is [N]; returns [N, T]."""
    rows, length = tokens.shape
    log_p, log_q = token_log_probs(sigma.model, twist, tokens)  # [N, T]
    for _ in range(times):
        kept = (uniforms(rows, 1, generator) * length).long()  # [N, 1] t
        is_new = torch.arange(length, device=tokens.device) >= kept  # [N, T]
        given = tokens.masked_fill(is_new, DRAWN)
        new = sample_proposal(sigma.model, twist, rows, generator, given=given)
        new_log_phi = sigma.log_potential(new.tokens, new.log_p.sum(-1))  # [N]
        log_change = (new.log_p - new.log_q) - (log_p - log_q)  # [N, T]
        log_ratio = log_change.masked_fill(~is_new, 0.0).sum(-1) + new_log_phi - log_phi  # [N]
        is_taken = uniforms(rows, 1, generator).log() < log_ratio[:, None]  # [N, 1]
        is_changed = is_taken & is_new  # [N, T]
        tokens = torch.where(is_taken, new.tokens, tokens)
        log_p = torch.where(is_changed, new.log_p, log_p)
        log_q = torch.where(is_changed, new.log_q, log_q)
        log_phi = torch.where(is_taken[:, 0], new_log_phi, log_phi)
    return tokens
