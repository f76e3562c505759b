"""KL-regularised reinforcement learning of the base model, a baseline that aims at sigma.

    max over pi of  E_pi[log phi(s)] - KL(pi || p^(0)),  with the optimum pi = p^(0) phi / Z = sigma
    A_t = log phi(s) + sum_{u >= t} log p^(0)(s_u) / pi(s_u),  minus its mean over the batch
    L = - mean over n of sum_t A_t log pi(s_t)

The regulariser has strength one (Korbak et al. 2022, "RL with KL penalties is better viewed as
Bayesian inference"), so that the optimum is sigma itself, and the reward is not standardised: its
scale beside the KL must stay. The gradient is that of KL(pi || sigma), which may leave out parts of
sigma; KL(sigma || pi) of the table counts them. N sequences, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.baseline import ROWS, Baseline, PolicyOptions
from distill.finetune import Student
from distill.options import option


@dataclass(frozen=True)
class RLOptions(PolicyOptions):
    learning_rate: float = option(3e-5, "AdamW's step size", high=1)


def rl_advantages(log_phi: Tensor, log_ratio: Tensor) -> Tensor:
    """A_t [N, T] of log phi [N] and log p^(0)(s_t) / pi(s_t) [N, T]; ValueError for phi = 0."""
    if not bool((log_phi > -torch.inf).all()):
        fault = "phi is zero on some text, which is an infinite reward"
        raise ValueError(f"{fault}; soften the potential, as keyword~8:dragon")
    to_go = log_ratio.flip(1).cumsum(1).flip(1) + log_phi.to(log_ratio.dtype)[:, None]  # [N, T]
    return to_go - to_go.mean(0)


class RL(Baseline):
    """A policy gradient on log p^(0) + log phi - log pi, from the policy's own samples."""

    Options = RLOptions

    def update(self, student: Student, generator: torch.Generator) -> dict[str, float]:
        """One update; returns the objective, up to log Z at most, and its two parts."""
        policy = self.base.with_network(student.network)
        batch = self.draw(policy, generator)
        tokens, log_phi = batch.tokens, batch.log_phi  # [N, T], [N]
        with torch.no_grad():
            parts = [self.base.log_probs(part) for part in tokens.split(ROWS)]
        log_ratio = torch.cat(parts) - batch.log_p  # [N, T]
        advantage = rl_advantages(log_phi, log_ratio) * batch.is_counted  # [N, T]
        for rows in torch.arange(len(tokens), device=tokens.device).split(ROWS):
            log_pi = policy.log_probs(tokens[rows])  # [r, T]
            loss = -(advantage[rows] * log_pi).sum() / len(tokens)
            loss.backward()
        student.step()
        figures = {"log_phi": log_phi.mean().item(), "kl": -log_ratio.sum(1).mean().item()}
        return figures | {"objective": figures["log_phi"] - figures["kl"]}
