"""The potential as each generation sees it, and the effective potential.

    log phi^(m)(s_{1:T}) = log p^(0)(s_{1:T}) + log phi(s_{1:T}) - log p^(m)(s_{1:T})            eq. 8

It keeps the target sigma, proportional to p^(0) phi, the same for every generation: p^(m) phi^(m) = p^(0) phi. phi itself is
`twist.factors.TextPotential`, or any function from tokens [N, T] to log phi [N]. N sequences, T tokens.
"""

from collections.abc import Callable

from torch import Tensor

from tsmc.interfaces import LanguageModel, LogPotential
from tsmc.scoring import sequence_log_probs


def base_potential(log_phi: Callable[[Tensor], Tensor]) -> LogPotential:
    """phi as the samplers take it at generation 0, where p^(0) is the model that is sampled."""
    return lambda tokens, log_p: log_phi(tokens)


def effective_potential(log_phi: Callable[[Tensor], Tensor], base: LanguageModel) -> LogPotential:
    """phi^(m) (eq. 8): one teacher-forced pass of the base model over the sequences, whatever p^(m) gave them log_p [N]."""
    return lambda tokens, log_p: sequence_log_probs(base, tokens) + log_phi(tokens) - log_p
