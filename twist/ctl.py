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
that falls linearly to a tenth. A batch in which phi is zero everywhere is skipped. Other objectives
are in `objectives.py`. K sequences, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.decoder import Conditional, counted
from tsmc import processes
from tsmc.draws import effective_sample_size, normalise
from tsmc.proposal import Trajectories, sample_proposal
from tsmc.sigma import Sigma, call_potential
from twist.mlp import TwistMLP

EXPLODED = 1000.0  # nats: beyond this, float32 no longer resolves the weights


@dataclass
class Batch(Trajectories):
    """What one update learns from: K sequences drawn i.i.d. from q, and their phi.

    `Trajectories` gives tokens, log_p and log_q [K, T] of s_t after s_{1:t-1}, log_psi [K, T] of
    s_{1:t}, and hidden [K, T, D].
    """

    log_phi: Tensor  # [K] log phi^(m)
    is_counted: Tensor  # [K, T] whether a token belongs to the text; its end repeats behind it
    model: Conditional  # p^(m)

    def log_positive(self) -> Tensor:
        """log w(s) = log p^(0) phi / q [K], the weights of sigma."""
        # For m > 0 log p^(m) cancels: it is added here, and log phi^(m) has subtracted it.
        return self.log_p.sum(-1) + self.log_phi - self.log_q.sum(-1)

    def log_negative(self) -> Tensor:
        """log p^(m)(s_{1:t}) psi(s_{1:t}) / q(s_{1:t}) [K, T], the weights of each pi_t."""
        # One batch serves every t, because q(s_{1:t}) is the marginal of q(s_{1:T}).
        return (self.log_p - self.log_q).cumsum(-1) + self.log_psi

    def ess(self) -> float:
        """The effective sample size of the positive weights."""
        return effective_sample_size(self.log_positive()).item()

    def is_sound(self) -> bool:
        """Whether no weight is NaN or infinite, and the twist has not exploded."""
        weights = (self.log_positive(), self.log_negative())
        is_finite = all(bool((log_weights < torch.inf).all()) for log_weights in weights)
        return is_finite and self.log_psi.abs().max().item() < EXPLODED

    def log_psi_of(self, twist: TwistMLP) -> Tensor:
        """log psi(s_{1:t}) [K, T] with gradient; behind the end it stays, as `wait` has it."""
        log_psi = twist.of_tokens(self.hidden, self.tokens)  # [K, T]
        last = self.is_counted.sum(1, keepdim=True) - 1  # [K, 1]
        places = torch.arange(log_psi.shape[1], device=last.device)  # [T]
        return log_psi.gather(1, torch.minimum(places, last))


def draw_batch(
    sigma: Sigma, twist: TwistMLP | None, size: int, generator: torch.Generator
) -> Batch:
    """Draw K = size sequences from the current q; each process draws some, and all have all."""
    drawn = sample_proposal(sigma.model, twist, size, generator, processes.own_rows(size))
    # phi^(m) divides by log p^(m).
    log_phi = call_potential(sigma.log_potential, drawn.tokens, drawn.log_p.sum(-1))  # [k]
    parts = vars(drawn) | {"log_phi": log_phi, "is_counted": counted(drawn.tokens, sigma.model.end)}
    gathered = {name: processes.gather_rows(part) for name, part in parts.items()}
    return Batch(**gathered, model=sigma.model)


def ctl_loss(twist: TwistMLP, batch: Batch) -> Tensor:
    """A scalar whose gradient is that of the CTL loss (eq. 6); its value stays around zero."""
    positive = normalise(batch.log_positive())  # [K]
    negative = normalise(batch.log_negative().T).T  # [K, T]
    # One positive weight serves every t, since sigma(s_{1:t}) is the marginal of whole sequences;
    # pi_t is another distribution at each t and has weights of its own.
    coefficients = positive[:, None] - negative  # [K, T]
    # log Z_t in eq. 5 is unknown, so the loss has no value; its gradient can be estimated.
    return -(coefficients * batch.log_psi_of(twist)).sum()
