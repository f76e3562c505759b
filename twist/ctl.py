"""Contrastive twist learning: CTL (eq. 5, eq. 6) and, with phi^(m) for phi (eq. 8), CTL-m.

    -grad L = sum_t { E_sigma[grad log psi(s_{1:t})] - E_{pi_t}[grad log psi(s_{1:t})] },
    pi_t proportional to p^(m) psi

One batch of K sequences drawn i.i.d. from q, without resampling, estimates both expectations by
self-normalised weights, through which no gradient flows:

    positive   w(s) = p^(m)(s) phi^(m)(s) / q(s) = p^(0)(s) phi(s) / q(s)    [K], for every t
    negative   p^(m)(s_{1:t}) psi(s_{1:t}) / q(s_{1:t})                      [K, T]

Under a sparse potential the effective sample size of the positive weights falls towards one;
self-distillation is the remedy.

What the paper leaves open: a new batch from the current q for every update; Adam, with a step size
that falls linearly to a tenth; each generation's twist starts at psi = 1. A batch in which phi is
zero everywhere is skipped. With several processes each has a part of the rows of a batch, but the
weights are normalised over all of them. K sequences, k of them this process's own, T tokens, D
width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.decoder import counted
from tsmc import processes
from tsmc.interfaces import LearnableTwist, call_potential
from tsmc.proposal import sample_proposal
from tsmc.resampling import effective_sample_size, normalise
from tsmc.sampler import Sigma

EXPLODED = 1000.0  # nats: beyond this, float32 no longer resolves the weights


@dataclass
class Batch:
    """What one update learns from."""

    tokens: Tensor  # [k, T]
    hidden: Tensor  # [k, T, D] what the twist saw
    coefficients: Tensor  # [k, T] what grad log psi(s_{1:t}) is multiplied with in -grad L (eq. 6)
    ess: float  # effective sample size of the positive weights
    is_sound: bool  # whether no weight is NaN or infinite, and the twist has not exploded


def draw_batch(
    sigma: Sigma, twist: LearnableTwist, batch_size: int, generator: torch.Generator
) -> Batch:
    """Draw K = batch_size sequences from the current q and weigh them."""
    own = processes.own_rows(batch_size)
    drawn = sample_proposal(sigma.model, twist, batch_size, generator, own)
    log_p = drawn.log_p.sum(-1)  # [k]
    log_phi = call_potential(sigma.log_potential, drawn.tokens, log_p)  # [k]
    # For m > 0 log p^(m) cancels: it is added here, and log phi^(m) has subtracted it.
    positive = log_p + log_phi - drawn.log_q.sum(-1)  # [k] log sigma / q
    # One batch serves every t, because q(s_{1:t}) is the marginal of q(s_{1:T}).
    negative = (drawn.log_p - drawn.log_q).cumsum(-1) + drawn.log_psi  # [k, T] log pi_t / q
    positive = processes.gather_rows(positive)  # [K]
    negative = processes.gather_rows(negative)  # [K, T]
    # One positive weight serves every t, since sigma(s_{1:t}) is the marginal of whole sequences;
    # pi_t is another distribution at each t and has weights of its own.
    coefficients = (normalise(positive)[:, None] - normalise(negative.T).T)[own]  # [k, T]
    # Behind the end psi waits: there log psi(s_{1:t}) is that of the last token, to which the
    # coefficients move.
    is_counted = counted(drawn.tokens, sigma.model.end)  # [k, T]
    last = is_counted.sum(1, keepdim=True) - 1  # [k, 1]
    behind = (coefficients * ~is_counted).sum(1, keepdim=True)  # [k, 1]
    coefficients.mul_(is_counted).scatter_add_(1, last, behind)
    ess = effective_sample_size(positive).item()
    is_finite = bool((positive < torch.inf).all() and (negative < torch.inf).all())
    is_sound = is_finite and drawn.log_psi.abs().max().item() < EXPLODED
    return Batch(drawn.tokens, drawn.hidden, coefficients, ess, is_sound)


def ctl_loss(twist: LearnableTwist, batch: Batch) -> Tensor:
    """A scalar whose gradient is that of the CTL loss (eq. 6); its value stays around zero."""
    # log Z_t in eq. 5 is unknown, so the loss has no value; its gradient can be estimated.
    return -(batch.coefficients.detach() * twist.of_tokens(batch.hidden, batch.tokens)).sum()
