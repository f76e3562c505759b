"""KL-regularised reinforcement learning of the base model, a baseline that aims at sigma.

    max over pi of  E_pi[log phi(s)] - KL(pi || p^(0)),  with the optimum pi = p^(0) phi / Z = sigma
    A_t = log phi(s) + sum_{u >= t} log p^(0)(s_u) / pi(s_u),  minus its mean over the batch
    L = - mean over n of sum_t A_t log pi(s_t)

The regulariser has strength one (Korbak et al. 2022, "RL with KL penalties is better viewed as
Bayesian inference"), so that the optimum is sigma itself, and the reward is not standardised: its
scale beside the KL must stay. The gradient is that of KL(pi || sigma), which may leave out parts of
sigma; KL(sigma || pi) of the table counts them. N sequences, T tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from distill.policy import ROWS, Policy
from tinystories.decoder import Conditional
from twist.ctl import Batch


def rl_advantages(log_phi: Tensor, log_ratio: Tensor) -> Tensor:
    """A_t [N, T] of log phi [N] and log p^(0)(s_t) / pi(s_t) [N, T]; ValueError for phi = 0."""
    if not bool((log_phi > -torch.inf).all()):
        fault = "phi is zero on some text, which is an infinite reward"
        raise ValueError(f"{fault}; soften the potential, as keyword~8:dragon")
    to_go = log_ratio.flip(1).cumsum(1).flip(1) + log_phi.to(log_ratio.dtype)[:, None]  # [N, T]
    return to_go - to_go.mean(0)


class RL(Policy):
    """Trained by a policy gradient on log p^(0) + log phi - log pi, from its own samples."""

    defaults = Policy.defaults | {"learning_rate": 3e-5}

    def losses(self, policy: Conditional, batch: Batch) -> Iterator[Tensor]:
        tokens = batch.drawn.tokens  # [N, T]
        with torch.no_grad():
            log_p = torch.cat([self.base.log_probs(part) for part in tokens.split(ROWS)])
        advantage = rl_advantages(batch.log_phi, log_p - batch.drawn.log_p)  # [N, T]
        for rows in torch.arange(len(tokens), device=tokens.device).split(ROWS):
            log_pi = policy.log_probs(tokens[rows])  # [r, T]
            yield -(advantage[rows] * log_pi).sum() / len(tokens)
