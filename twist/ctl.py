"""Contrastive twist learning: CTL (eq. 5, eq. 6) and, with phi^(m) for phi (eq. 8), CTL-m.

    -grad L = sum_t { E_sigma[grad log psi(s_{1:t})] - E_{pi_t}[grad log psi(s_{1:t})] },
    pi_t proportional to p^(m) psi

One batch of K sequences drawn i.i.d. from q, without resampling, estimates both expectations by
self-normalised weights, through which no gradient flows:

    positive   w(s) = p^(m)(s) phi^(m)(s) / q(s) = p^(0)(s) phi(s) / q(s)    [K], for every t
    negative   p^(m)(s_{1:t}) psi(s_{1:t}) / q(s_{1:t})                      [K, T]

Each update has a new batch from the current q, which the paper leaves open. K sequences, T tokens.
"""

from dataclasses import dataclass

from torch import Generator, Tensor

from tsmc.draws import normalise
from tsmc.proposal import Drawn, sample_proposal
from tsmc.sigma import Sigma
from twist.mlp import TwistMLP


@dataclass
class Batch:
    """What one update learns from: K sequences drawn i.i.d. from q, and their phi."""

    drawn: Drawn  # tokens, log_p, log_psi, log_q [K, T], hidden [K, T, D]
    log_phi: Tensor  # [K] log phi^(m)

    def log_positive(self) -> Tensor:
        """log w(s) = log p^(0) phi / q [K], the weights of sigma."""
        # For m > 0 log p^(m) cancels: it is added here, and log phi^(m) has subtracted it.
        return self.drawn.log_p.sum(-1) + self.log_phi - self.drawn.log_q.sum(-1)

    def log_negative(self) -> Tensor:
        """log p^(m)(s_{1:t}) psi(s_{1:t}) / q(s_{1:t}) [K, T], the weights of each pi_t."""
        # One batch serves every t, because q(s_{1:t}) is the marginal of q(s_{1:T}).
        return (self.drawn.log_p - self.drawn.log_q).cumsum(-1) + self.drawn.log_psi


def draw_batch(sigma: Sigma, twist: TwistMLP | None, size: int, generator: Generator) -> Batch:
    """K = size sequences from the current q, and their phi."""
    drawn = sample_proposal(sigma.model, twist, size, generator)
    return Batch(drawn, sigma.log_potential(drawn.tokens, drawn.log_p.sum(-1)))


def ctl_loss(twist: TwistMLP, batch: Batch) -> Tensor:
    """A scalar whose gradient is that of the CTL loss (eq. 6); its value stays around zero."""
    positive = normalise(batch.log_positive())  # [K]
    negative = normalise(batch.log_negative().T).T  # [K, T]
    # One positive weight serves every t, since sigma(s_{1:t}) is the marginal of whole sequences;
    # pi_t is another distribution at each t and has weights of its own.
    coefficients = (positive[:, None] - negative).contiguous()  # [K, T]
    log_psi = twist.of_tokens(batch.drawn.hidden, batch.drawn.tokens)  # [K, T]
    # log Z_t in eq. 5 is unknown, so the loss has no value; its gradient can be estimated.
    return -(coefficients * log_psi).sum()
