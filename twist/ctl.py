"""Contrastive twist learning: CTL (eq. 5, eq. 6) and, from generation 1 on, CTL-m, the same with phi^(m) for phi (eq. 8).

    -grad L = sum_t { E_sigma[grad log psi(s_{1:t})] - E_{pi_t}[grad log psi(s_{1:t})] },   pi_t proportional to p^(m) psi

One batch of K sequences drawn i.i.d. from q, without resampling, estimates both expectations by self-normalised weights:
    positive   w(s) = p^(m)(s) phi^(m)(s) / q(s) = p^(0)(s) phi(s) / q(s)       one vector [K], used for every t
    negative   p^(m)(s_{1:t}) psi(s_{1:t}) / q(s_{1:t})                          one vector per t [K, T]
No gradient flows through any weight. The effective sample size of the positive weights tells how many sequences the batch
really learns from; under a sparse potential it collapses towards one, which self-distillation answers.

What the paper leaves open:
 1. Positives and negatives come from one and the same batch, drawn anew for every update from q as it is then.
 2. Adam, the step size falling linearly to a tenth of what it was; in every generation the twist starts anew from psi = 1.
 3. A batch in which phi is zero everywhere says nothing of sigma and is passed over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.interfaces import LearnableTwist, LogPotential
from tsmc.sampler import Sigma
from tsmc.steps import Steps
from tsmc.trajectories import Trajectories, sample_proposal
from tsmc.weights import effective_sample_size, normalise

EXPLODED = 1000.0  # nats: beyond, float32 no longer resolves the weights


@dataclass
class Batch:
    """What one update learns from; of a batch that several processes share, the rows of this one."""

    tokens: Tensor  # [K, T]
    hidden: Tensor  # [K, T, D] what the twist saw
    coefficients: Tensor  # [K, T] what grad log psi(s_{1:t}) is multiplied with in -grad L
    ess: float  # effective sample size of the positive weights


def positive_log_weights(batch: Trajectories, log_potential: LogPotential) -> Tensor:
    """log w(s) [K] = log p^(m)(s) + log phi^(m)(s) - log q(s): the importance weights of sigma in eq. 6."""
    log_p = batch.log_p.sum(-1)  # [K]
    return log_p + log_potential(batch.tokens, log_p) - batch.log_q.sum(-1)


def negative_log_weights(batch: Trajectories) -> Tensor:
    """log p^(m)(s_{1:t}) + log psi(s_{1:t}) - log q(s_{1:t}) [K, T]: the importance weights of pi_t (eq. 4) in eq. 6."""
    return (batch.log_p - batch.log_q).cumsum(-1) + batch.log_psi


def ctl_coefficients(positive: Tensor, negative: Tensor) -> Tensor:
    """What grad log psi(s_{1:t}) is multiplied with in eq. 6 [K, T], from log weights positive [K] and negative [K, T]."""
    return normalise(positive)[:, None] - normalise(negative.T).T


def ctl_loss(twist: LearnableTwist, batch: Batch) -> Tensor:
    """A scalar whose gradient is that of the CTL loss (eq. 6). Its value means little: it hovers around zero."""
    return -(batch.coefficients.detach() * twist.of_tokens(batch.hidden, batch.tokens)).sum()


def weigh(batch: Trajectories, positive: Tensor, negative: Tensor) -> Batch:
    """The batch with its weights; InputError where one is NaN or infinite, or where log psi has grown beyond all sense."""
    if not bool((positive < torch.inf).all() and (negative < torch.inf).all()):
        raise InputError("twist learning: a weight is NaN or infinite; lower the learning rate or check the potential")
    largest = batch.log_psi.abs().max().item() if len(batch.tokens) else 0.0
    if largest > EXPLODED:
        raise InputError(f"twist learning: the twist has exploded to {largest:.0f} nats; lower the learning rate")
    ess = effective_sample_size(positive).item()
    return Batch(batch.tokens, batch.hidden, ctl_coefficients(positive, negative), ess)


def batches_from_proposal(
    sigmas: Sequence[Sigma], twist: LearnableTwist, batch_size: int, generator: torch.Generator
) -> Callable[[int], Batch]:
    """Draws the batch of an update from q as it is then; with several prompts, each with its sigma, they take turns."""

    def draw(update: int) -> Batch:
        sigma = sigmas[update % len(sigmas)]
        batch = sample_proposal(sigma.model, twist, batch_size, generator, keep_hidden=True)
        return weigh(batch, positive_log_weights(batch, sigma.log_potential), negative_log_weights(batch))

    return draw


def learn_twist(
    twist: LearnableTwist, optimizer: torch.optim.Optimizer, draw_batch: Callable[[int], Batch], steps: Steps
) -> None:
    """Train `twist` in place (eq. 5); reports the loss and the ESS of the positive weights of every step."""
    first_rate = optimizer.param_groups[0]["lr"]
    for update in steps:
        optimizer.param_groups[0]["lr"] = first_rate * (1 - 0.9 * update / len(steps))
        batch = draw_batch(update)
        loss = ctl_loss(twist, batch)
        steps.report(loss=loss.detach(), ess=batch.ess)
        if batch.ess > 0:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
