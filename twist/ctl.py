"""Contrastive twist learning, CTL and CTL-m (paper eq. 5 and 6, and Sec. 2, Phase 2).

    -grad L = sum_t { E_sigma[grad log psi(s_{1:t})] - E_{pi_t}[grad log psi(s_{1:t})] },   pi_t proportional to p^(m) psi

One batch of K sequences drawn i.i.d. from q, without resampling, estimates both expectations by self-normalised weights:
    positive   w(s) = p^(m)(s) phi^(m)(s) / q(s) = p^(0)(s) phi(s) / q(s)       one vector [K], used for every t
    negative   p^(m)(s_{1:t}) psi(s_{1:t}) / q(s_{1:t})                          one vector per t [K, T]
No gradient flows through any weight. The effective sample size of the positive weights tells how many sequences the batch
really learns from; under a sparse potential it collapses towards one, which self-distillation answers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.proposal import LanguageModel, Trajectories, sample_proposal
from tsmc.sampler import LogPotential
from tsmc.weights import effective_sample_size, normalise


class LearnableTwist(Protocol):
    """A twist with parameters; `of_tokens(hidden [K, T, D], tokens [K, T]) -> log psi [K, T]` carries the gradient."""

    def __call__(self, hidden: Tensor) -> Tensor: ...

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor: ...

    def parameters(self): ...


@dataclass(frozen=True)
class CTLConfig:
    """Twist learning."""

    updates: int = field(default=150, metadata={"help": "gradient steps in each generation", "at_least": 1})
    batch_size: int = field(
        default=100, metadata={"help": "K sequences drawn i.i.d. from q for one step", "at_least": 2}
    )
    learning_rate: float = field(
        default=2e-4,
        metadata={"help": "Adam's step size; falls linearly to a tenth of it", "at_least": 0, "at_most": 1},
    )
    hidden_units: int = field(default=192, metadata={"help": "width of the twist's two hidden layers", "at_least": 1})


def positive_log_weights(batch: Trajectories, log_potential: LogPotential) -> Tensor:
    """log w(s) [K] = log p^(m)(s) + log phi^(m)(s) - log q(s): the importance weights of sigma."""
    log_p = batch.log_p.sum(-1)  # [K]
    return log_p + log_potential(batch.tokens, log_p) - batch.log_q.sum(-1)


def negative_log_weights(batch: Trajectories) -> Tensor:
    """log p^(m)(s_{1:t}) + log psi(s_{1:t}) - log q(s_{1:t}) [K, T]: the importance weights of pi_t at every t."""
    return (batch.log_p - batch.log_q).cumsum(-1) + batch.log_psi


def ctl_loss(twist: LearnableTwist, batch: Trajectories, positive: Tensor, negative: Tensor) -> Tensor:
    """A scalar whose gradient is that of the CTL loss; positive [K] and negative [K, T] log weights are constants."""
    coefficients = normalise(positive)[:, None] - normalise(negative.T).T  # [K, T]
    return -(coefficients.detach() * twist.of_tokens(batch.hidden, batch.tokens)).sum()


def learn_twist(
    model: LanguageModel,
    twist: LearnableTwist,
    log_potential: LogPotential,
    config: CTLConfig,
    generator: torch.Generator,
    report: Callable[..., None],
) -> None:
    """Train `twist` in place against sigma, proportional to p^(m) phi^(m); calls report(update, loss=, ess=) after each step.

    The loss that is reported is the estimate of sum_t E_sigma[log psi] - E_pi[log psi] with its sign turned: only its
    gradient means anything, and it hovers around zero. A batch without any positive weight is passed over (ess=0).
    InputError where a weight or the loss is NaN.
    """
    optimizer = torch.optim.Adam(twist.parameters(), lr=config.learning_rate)
    for update in range(config.updates):
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - 0.9 * update / config.updates)
        batch = sample_proposal(model, twist, config.batch_size, generator, keep_hidden=True)
        positive = positive_log_weights(batch, log_potential)
        ess = effective_sample_size(positive).item()
        loss = ctl_loss(twist, batch, positive, negative_log_weights(batch))
        if not torch.isfinite(loss) or positive.isnan().any():
            words = "the loss is not finite; lower --ctl-learning-rate or check the potential"
            raise InputError(f"twist learning, update {update + 1}: {words}")
        if ess > 0:  # a batch in which phi is zero everywhere says nothing of sigma
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(update + 1, loss=loss.item(), ess=ess)
