"""Moves that leave sigma as it is, so that equal particles part after the last resampling (Gilks & Berzuini, 2001).

    t uniform in 0..T-1,   s'_{1:t} = s_{1:t},   s'_{t+1:T} ~ q( . | s_{1:t})
    s' replaces s with probability min(1, v_t(s') / v_t(s)),   v_t(s) = phi(s) prod_{u > t} p(s_u | s_{0:u-1}) / q_u(s_u)

t and the tokens up to t are the same on the way back, so this is a Metropolis-Hastings step for sigma, proportional to p phi,
whatever q is; and so is any number of them. A move costs a little more than drawing and scoring its particle has cost.
N sequences, R runs of K particles, T tokens.
"""

import torch
from torch import Tensor

from tsmc.categorical import uniforms
from tsmc.interfaces import Twist
from tsmc.population import Population, follow
from tsmc.sampler import Sigma
from tsmc.scoring import token_log_probs
from tsmc.trajectories import trajectories


@torch.no_grad()
def move(
    sigma: Sigma, twist: Twist | None, tokens: Tensor, log_phi: Tensor, times: int, generator: torch.Generator
) -> Tensor:
    """Sequences [N, T] after so many moves of each of tokens [N, T], whose log phi [N] is known."""
    model, (rows, length) = sigma.model, tokens.shape
    log_p, log_q = token_log_probs(model, twist, tokens)  # [N, T]
    for _ in range(times):
        kept = (uniforms(rows, 1, generator) * length).long()  # [N, 1] t
        is_new = torch.arange(length, device=tokens.device) >= kept  # [N, T]
        uniform = uniforms(length * rows, 1, generator).view(length, rows, 1)
        new = trajectories(model, twist, uniform, False, tokens.masked_fill(is_new, -1))
        new_log_phi = sigma.log_potential(new.tokens, new.log_p.sum(-1))  # [N]
        log_ratio = (
            ((new.log_p - new.log_q) - (log_p - log_q)).masked_fill(~is_new, 0.0).sum(-1) + new_log_phi - log_phi
        )
        is_taken = uniforms(rows, 1, generator).log() < log_ratio[:, None]  # [N, 1]
        tokens = torch.where(is_taken, new.tokens, tokens)
        is_changed = is_taken & is_new
        log_p, log_q = torch.where(is_changed, new.log_p, log_p), torch.where(is_changed, new.log_q, log_q)
        log_phi = torch.where(is_taken[:, 0], new_log_phi, log_phi)
    return tokens


def move_samples(
    sigma: Sigma, twist: Twist | None, population: Population, times: int, generator: torch.Generator
) -> None:
    """Move the samples of R runs in place of those that the final resampling has given."""
    log_phi = follow(population.ancestors, population.log_phi)  # [R, K]
    moved = move(sigma, twist, population.samples.flatten(0, 1), log_phi.flatten(), times, generator)
    population.samples = moved.view_as(population.samples)
