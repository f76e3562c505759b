"""Contrastive twist learning, CTL and CTL-m (paper eq. 5 and 6, and Sec. 2, Phase 2).

    -grad L = sum_t { E_sigma[grad log psi(s_{1:t})] - E_{pi_t}[grad log psi(s_{1:t})] },   pi_t proportional to p^(m) psi

One batch of K sequences drawn i.i.d. from q, without resampling, estimates both expectations by self-normalised weights:
    positive   w(s) = p^(m)(s) phi^(m)(s) / q(s) = p^(0)(s) phi(s) / q(s)       one vector [K], used for every t
    negative   p^(m)(s_{1:t}) psi(s_{1:t}) / q(s_{1:t})                          one vector per t [K, T]
No gradient flows through any weight. The effective sample size of the positive weights tells how many sequences the batch
really learns from; under a sparse potential it collapses towards one, which self-distillation answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eval.run import processes as ranks
from tinystories.errors import InputError
from tsmc.proposal import Trajectories, sample_proposal
from tsmc.sampler import LogPotential, Sigma
from tsmc.steps import Phase
from tsmc.weights import effective_sample_size, normalise

EXPLODED = 1000.0  # nats: beyond, float32 no longer resolves the weights


class LearnableTwist(Protocol):
    """A twist with parameters; `of_tokens(hidden [K, T, D], tokens [K, T]) -> log psi [K, T]` carries the gradient."""

    def __call__(self, hidden: Tensor) -> Tensor: ...

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor: ...

    def parameters(self): ...

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict): ...


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


def ctl_coefficients(positive: Tensor, negative: Tensor) -> Tensor:
    """What grad log psi(s_{1:t}) is multiplied with in -grad L [K, T], from log weights positive [K] and negative [K, T]."""
    return normalise(positive)[:, None] - normalise(negative.T).T


def ctl_loss(twist: LearnableTwist, batch: Trajectories, coefficients: Tensor) -> Tensor:
    """A scalar whose gradient is that of the CTL loss; coefficients [K, T] are constants."""
    return -(coefficients.detach() * twist.of_tokens(batch.hidden, batch.tokens)).sum()


def check_batch(update: int, positive: Tensor, log_psi: Tensor) -> None:
    """InputError where log weights [K] are NaN or infinite or log psi [K, T] has grown beyond all sense."""
    remedy = "lower --ctl-learning-rate"
    largest = ranks.largest(log_psi.abs().max().item() if len(log_psi) else 0.0)
    if not bool((positive < torch.inf).all()) or not math.isfinite(largest):
        words = f"a weight is NaN or infinite; {remedy}, or check that the potential is never NaN"
        raise InputError(f"twist learning, update {update + 1}: {words}")
    if largest > EXPLODED:
        words = f"the twist has exploded, |log psi| reaches {largest:.0f}; {remedy}"
        raise InputError(f"twist learning, update {update + 1}: {words}")


def learn_twist(
    sigmas: Sequence[Sigma], twist: LearnableTwist, config: CTLConfig, generator: torch.Generator, phase: Phase
) -> None:
    """Train `twist` in place against each sigma in turn (one for each prompt); reports loss= and ess= of every step.

    The loss that is reported is the estimate of sum_t E_sigma[log psi] - E_pi[log psi] with its sign turned: only its
    gradient means anything, and it hovers around zero. A batch without any positive weight is passed over (ess=0).
    InputError, before the step is taken, where the loss or a weight is not finite or the twist has exploded.
    """
    optimizer = torch.optim.Adam(twist.parameters(), lr=config.learning_rate)
    mine = ranks.share(config.batch_size)
    for update in phase.steps(config.updates, twist=twist, optimizer=optimizer, generator=generator):
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - 0.9 * update / config.updates)
        sigma = sigmas[update % len(sigmas)]
        batch = sample_proposal(sigma.model, twist, config.batch_size, generator, keep_hidden=True, mine=mine)
        positive = ranks.gather(positive_log_weights(batch, sigma.log_potential), config.batch_size)  # [K]
        negative = ranks.gather(negative_log_weights(batch), config.batch_size)  # [K, T]
        check_batch(update, positive, batch.log_psi)
        loss = ctl_loss(twist, batch, ctl_coefficients(positive, negative)[mine])
        ess = effective_sample_size(positive).item()
        if ess > 0:  # a batch in which phi is zero everywhere says nothing of sigma
            optimizer.zero_grad()
            loss.backward()
            ranks.add_gradients(twist.parameters())
            optimizer.step()
        phase.report(loss=ranks.total(loss.detach()).item(), ess=ess)
