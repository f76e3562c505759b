"""KL-regularised reinforcement learning of the base model, a baseline that aims at sigma.

    max over pi of  E_pi[log phi(s)] - KL(pi || p^(0)),  with the optimum pi = p^(0) phi / Z = sigma
    A_t = log phi(s) + sum_{u >= t} log p^(0)(s_u) / pi(s_u),  minus its mean over the batch
    L = - mean over n of sum_t A_t log pi(s_t)

The regulariser has strength one (Korbak et al. 2022), so that the optimum is sigma itself, and the
reward keeps its scale. The gradient is that of KL(pi || sigma), which may leave out parts of sigma.
"""

import torch
from torch import Tensor

from distill.policy import Policy
from tinystories.decoder import Conditional
from twist.ctl import Batch


class RL(Policy):
    """Trained by a policy gradient on log p^(0) + log phi - log pi, from its own samples."""

    defaults = Policy.defaults | {"learning_rate": 3e-5}

    def loss(self, policy: Conditional, batch: Batch) -> Tensor:
        tokens, log_phi = batch.drawn.tokens, batch.log_phi  # [N, T], [N]
        if not bool((log_phi > -torch.inf).all()):
            raise ValueError("phi is zero on some text, an infinite reward; give keyword~8:WORD")
        with torch.no_grad():
            log_p = self.base.log_probs(tokens)  # [N, T]
        log_ratio = log_p - batch.drawn.log_p  # [N, T]
        to_go = log_ratio.flip(1).cumsum(1).flip(1) + log_phi.to(log_ratio.dtype)[:, None]
        advantage = to_go - to_go.mean(0)  # [N, T]
        return -(advantage * policy.log_probs(tokens)).sum() / len(tokens)
