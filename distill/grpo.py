"""Group relative policy optimisation of the base model, a baseline (paper eq. 10).

    s^(1..N) ~ pi,   r = log phi,   A^(n) = (r^(n) - mean r) / std r
    L = mean over n and t of  -(pi / sg(pi)) A^(n) + b (p^(0) / pi - log(p^(0) / pi) - 1),
    where pi and p^(0) are those of s_t^(n) given its past

Every update draws a new batch from the policy as it is, so the ratio is 1 and carries only the
gradient. L = 0 where pi = p^(0), but its gradient is not.

Where the paper departs from Shao et al. 2024:
 1. One prompt and one group, the whole batch of 1024; there 64 outputs for each of many questions.
 2. One update for each batch, so there is no older policy and no clipping.
 3. All outputs have T tokens, so the mean over n and t weighs all outputs alike.
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

from collections.abc import Callable

import torch
from torch import Tensor

from distill.finetune import ROWS, BaselineConfig, Student, rewards
from tinystories.decoder import counted
from tsmc.categorical import widest
from tsmc.interfaces import BaseModel, Report, ignore
from tsmc.proposal import sample_proposal


def advantages(reward: Tensor) -> Tensor:
    """A [N], of mean 0 and variance 1, or all zero, of rewards [N], which may hold -inf."""
    reward = reward.to(widest(reward.device))
    possible = reward > -torch.inf
    if not possible.all():
        reward = possible.to(reward.dtype)
    if (reward == reward[0]).all():  # rounding of the mean would otherwise be blown up to size 1
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
    return loss[is_counted].mean()


def grpo(
    base: BaseModel,
    log_phi: Callable[[Tensor], Tensor],
    config: BaselineConfig,
    lora: bool,
    generator: torch.Generator,
    report: Report = ignore,
) -> BaseModel:
    """pi, trained from p^(0) = base, a plain network that is kept, for log_phi(tokens [N, T]) [N].

    Reports the loss, which for texts of one length is b times the penalty because A has mean 0, and
    the samples' mean phi. InputError where log phi is NaN or +inf, Diverged where the trained model
    is not finite.
    """
    student = Student(base.network, config.learning_rate, config.weight_decay, lora, generator)
    policy = student.after(base)

    def loss(tokens: Tensor, advantage: Tensor, relative_length: Tensor) -> Tensor:
        with torch.no_grad():
            log_ref = base.log_probs(tokens)[0]  # [N, T]
        is_counted = counted(tokens, base.end)
        log_pi = policy.log_probs(tokens)[0]  # [N, T]
        mean = grpo_loss(log_pi, log_ref, advantage, config.strength, is_counted)
        return mean * relative_length.mean()  # the part's share of the tokens of the batch

    for _ in range(config.updates):
        current = base.with_network(student.merged())
        tokens = sample_proposal(current, None, config.batch_size, generator).tokens
        reward = rewards(log_phi, tokens)
        lengths = counted(tokens, base.end).sum(1).float()  # [N]
        rows = (tokens, advantages(reward), lengths / lengths.mean())
        mean_loss = student.update(loss, ROWS, *rows)
        report(loss=mean_loss, phi=reward.exp().mean())
    return base.with_network(student.finish())
