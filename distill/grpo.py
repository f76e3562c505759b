"""Group relative policy optimisation of the base model, a baseline (paper eq. 10).

    s^(1..N) ~ pi,   r = log phi,   A^(n) = (r^(n) - mean r) / std r
    L = mean over n and t of  -(pi / sg(pi)) A^(n) + b (p^(0) / pi - log(p^(0) / pi) - 1),
    where pi and p^(0) are those of s_t^(n) given its past

Every update draws a new batch from the policy as it is, so the ratio is 1 and carries only the
gradient. L = 0 where pi = p^(0), but its gradient is not.

Where the paper departs from Shao et al. 2024:
 1. One prompt and one group, the whole batch of 1024; there 64 outputs for each of many questions.
 2. One update for each batch, so there is no older policy and no clipping.
 3. The mean over t is taken within each text, so that all outputs count alike where a token `end`
    finishes some of them before T.
 4. The reference stays p^(0); there, in the iterated form, the policy replaces it now and then.
 5. The reward of a whole sequence is given, not learned.

What the paper leaves open:
 6. r is log phi rather than phi: phi = p(toxic)^beta is near zero on almost every sample. As A is
    standardised, beta of the potential has no effect.
 7. std is the population's (divided by N). A = 0 where all rewards are equal.
 8. A reward of -inf, where phi is zero, stands for the limit of a falling reward. Beside it the
    differences between finite rewards vanish: A becomes that of the indicator of phi > 0.
 9. The gradient of the penalty takes the samples as given, as the formula says. Its mean over
    samples of the policy is the gradient of KL(p^(0) || pi) per token, not of KL(pi || p^(0)),
    which is what the term's value estimates.

N sequences, T tokens; sg stops the gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.baseline import ROWS, Baseline, BaselineOptions
from distill.finetune import Student
from distill.options import option


def advantages(reward: Tensor) -> Tensor:
    """A [N], of mean 0 and variance 1, or all zero, of rewards [N], which may hold -inf."""
    reward = reward.double()
    possible = reward > -torch.inf
    if not possible.all():
        reward = possible.to(reward.dtype)
    # A spread below the rounding of float32 scores would otherwise be blown up to size 1.
    if reward.std(correction=0) <= 1e-6 * reward.abs().max():
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / reward.std(correction=0)


def grpo_loss(
    log_pi: Tensor, log_ref: Tensor, advantage: Tensor, strength: float, is_counted: Tensor
) -> Tensor:
    """L (eq. 10), a scalar, of token log-probs [N, T] and advantages [N]; which count [N, T]."""
    ratio = (log_pi - log_pi.detach()).exp()  # [N, T], equal to 1
    log_ratio = log_ref - log_pi  # [N, T]
    k3 = log_ratio.exp() - log_ratio - 1
    loss = strength * k3 - ratio * advantage[:, None].to(ratio.dtype)  # [N, T]
    return ((loss * is_counted).sum(1) / is_counted.sum(1)).mean()


@dataclass(frozen=True)
class GRPOOptions(BaselineOptions):
    learning_rate: float = option(1e-3, "AdamW's step size", high=1)
    strength: float = option(0.64, "b, how strongly the policy is held to p^(0)")


class GRPO(Baseline):
    """Trained by the advantages of its own samples."""

    Options = GRPOOptions

    def update(self, student: Student, generator: torch.Generator) -> dict[str, float]:
        """One update; returns its loss and the samples' mean phi."""
        options = self.options
        policy = self.base.with_network(student.network)
        batch = self.draw(policy, generator)
        tokens, is_counted = batch.tokens, batch.is_counted  # [N, T] each
        advantage = advantages(batch.log_phi)  # [N]
        total = 0.0
        for rows in torch.arange(len(tokens), device=tokens.device).split(ROWS):
            with torch.no_grad():
                log_ref = self.base.log_probs(tokens[rows])  # [r, T]
            log_pi = policy.log_probs(tokens[rows])  # [r, T]
            loss = grpo_loss(log_pi, log_ref, advantage[rows], options.strength, is_counted[rows])
            loss = loss * (len(rows) / len(tokens))  # the rows' share of the batch
            loss.backward()
            total += loss.item()
        student.step()
        return {"loss": total, "phi": batch.log_phi.exp().mean().item()}
