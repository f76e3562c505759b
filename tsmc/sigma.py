"""The target sigma (eq. 2), and what it is seen as from the language model of each generation.

    sigma(s) proportional to p^(0)(s) phi(s)                                                   eq. 2
    phi^(m)(s) = p^(0)(s) phi(s) / p^(m)(s)                                                    eq. 8

p^(m) phi^(m) = p^(0) phi, so the target is the same in every generation, whichever language model
p^(m) the particles are drawn from. A potential that says something about beginnings has a prefix
part f_t(s_{1:t}) as well, which guides particles and cancels at T (`tsmc/sampler.py`). All calls of
a potential go through `call_potential`.
N texts, t or T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.decoder import Conditional
from tsmc.proposal import sequence_log_probs

LogPotential = Callable[[Tensor, Tensor], Tensor]
"""log_potential(tokens [N, T], log_p [N]) -> log phi [N].

log_p = log p(s_{1:T}) is passed because effective potentials divide by it (eq. 8).
"""
LogPrefix = Callable[[Tensor], Tensor]
"""log_prefix(tokens [N, t]) -> log f_t [N] of unfinished sequences, t < T; None means f = 1."""


@dataclass(frozen=True)
class Sigma:
    """The target, proportional to p(s) phi(s) (eq. 2), as seen from one language model."""

    model: Conditional
    log_potential: LogPotential
    log_prefix: LogPrefix | None = None  # log f_t of beginnings


def call_potential(log_phi: Callable[..., Tensor], tokens: Tensor, *log_p: Tensor) -> Tensor:
    """log phi [N] of tokens [N, T], given as a copy, and of log_p [N] where it is given.

    ValueError for NaN and infinity, by which all other texts would lose their weight.
    """
    values = log_phi(tokens.clone(), *log_p)
    assert values.shape == tokens.shape[:1], "log phi must be a tensor with a number for each text"
    assert values.dtype.is_floating_point, "log phi must be floating-point: 0 for true, else -inf"
    if not bool((values < torch.inf).all()):
        raise ValueError("log phi is NaN or infinite on some text; return numbers below infinity")
    return values


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: Conditional) -> LogPotential:
    """phi^(m) (eq. 8) with p^(0) = base; log_p [N] is that of p^(m)."""

    def log_phi_m(tokens: Tensor, log_p: Tensor) -> Tensor:
        return sequence_log_probs(base, tokens) + call_potential(log_phi, tokens) - log_p

    return log_phi_m


def seen_from(
    model: Conditional,
    base: Conditional,
    log_phi: Callable[[Tensor], Tensor],
    is_effective: bool = True,
) -> Sigma:
    """sigma as p^(m) = model sees it: through phi^(m) (eq. 8), which is phi if p^(m) is p^(0).

    Without `is_effective` phi stays as it is, and the target drifts with p^(m). Only p^(0) has the
    prefix part: another p^(m) has learned what it says, which would count twice (measured in
    docs/results.md). Z-hat is unbiased with and without it.
    """
    if model is not base and is_effective:
        return Sigma(model, effective_potential(log_phi, base))
    log_prefix = getattr(log_phi, "log_prefix", None) if model is base else None
    return Sigma(model, lambda tokens, log_p: log_phi(tokens), log_prefix)
