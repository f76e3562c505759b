"""The target sigma (eq. 2), and what it is seen as from the language model of each generation.

    sigma(s) proportional to p^(0)(s) phi(s)                                                   eq. 2
    phi^(m)(s) = p^(0)(s) phi(s) / p^(m)(s)                                                    eq. 8

p^(m) phi^(m) = p^(0) phi: sigma stays the target. For f_t see `sampler.py`. N texts, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tinystories.decoder import Conditional
from tsmc.proposal import sequence_log_probs


@dataclass(frozen=True)
class Sigma:
    """The target, proportional to p^(0) phi, as seen from p^(m) = model."""

    model: Conditional
    base: Conditional  # p^(0)
    log_phi: Callable[[Tensor], Tensor]  # tokens [N, T] -> [N]; may have a method `log_prefix`
    is_effective: bool = True  # False: phi stays as it is, and the target drifts with p^(m)

    def log_potential(self, tokens: Tensor, log_p: Tensor) -> Tensor:
        """log phi^(m) [N] (eq. 8) of tokens [N, T] with log p^(m) [N]; phi itself at m = 0."""
        log_phi = self.log_phi(tokens)  # [N]
        if self.model is self.base or not self.is_effective:
            return log_phi
        return sequence_log_probs(self.base, tokens) + log_phi - log_p

    @property
    def log_prefix(self) -> Callable[[Tensor], Tensor] | None:
        """log f_t [N] of beginnings tokens [N, t], t < T, or None. It guides p^(0) alone: another
        p^(m) has learned what f says, which would count twice."""
        has_prefix = self.model is self.base and getattr(self.log_phi, "has_prefix", False)
        return self.log_phi.log_prefix if has_prefix else None
