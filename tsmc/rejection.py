"""Exact samples of sigma (eq. 2) by rejection: draw s from p, accept with probability phi(s), which never exceeds one.

    acceptance rate  ->  Z_sigma = E_p[phi(s)],   log Z_sigma-hat = log mean_n phi(s_n) over all N proposals

The mean of phi itself estimates Z_sigma with a smaller variance than the share accepted. N proposals, A accepted, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.categorical import uniforms
from tsmc.interfaces import LanguageModel
from tsmc.steps import Chunks
from tsmc.trajectories import sample_proposal


@dataclass(frozen=True)
class ExactSamples:
    """Accepted sequences, and what all proposals say of the evidence."""

    tokens: Tensor  # [A, T]
    log_phi: Tensor  # [A]
    num_proposals: int
    log_z: float
    log_z_std_error: float

    def to(self, device: torch.device) -> "ExactSamples":
        """The same with its tensors on `device`."""
        return replace(self, tokens=self.tokens.to(device), log_phi=self.log_phi.to(device))


def log_mean_with_error(log_values: Tensor) -> tuple[float, float]:
    """log of the mean of exp(log_values [N]) and the standard error of that log (delta method, float64).

    The error is infinite where the values cannot tell: a single one, or all zero.
    """
    values = log_values.cpu().double()
    log_mean = values.logsumexp(0).item() - math.log(len(values))
    if len(values) < 2 or log_mean == -math.inf:
        return log_mean, math.inf
    relative = (values - log_mean).exp()  # phi / Z, mean one
    return log_mean, relative.std().item() / math.sqrt(len(values))


def accept(log_phi: Tensor, generator: torch.Generator) -> Tensor:
    """True [N] with probability phi; InputError where log phi [N] is above zero, NaN, or the acceptance is undefined."""
    if bool(log_phi.isnan().any()):
        raise InputError("log phi is NaN on some sequence; check the potential")
    if (highest := log_phi.max().item()) > 1e-6:
        why = f"log phi is {highest:.4g} on some sequence, but rejection accepts with probability phi and needs log phi <= 0"
        remedy = "subtract an upper bound, which leaves sigma as it is, or do without exact samples (TSMC needs none)"
        raise InputError(f"{why}; {remedy}")
    uniform = uniforms(len(log_phi), 1, generator)[:, 0]
    return uniform < log_phi.to(uniform.dtype).exp()


def rejection_sample(model: LanguageModel, log_phi: Callable[[Tensor], Tensor], chunks: Chunks) -> ExactSamples:
    """Draw N = chunks.total sequences from p and keep those accepted under log_phi(tokens [B, T]) -> [B].

    The number of proposals is fixed in advance, which keeps the estimate of Z_sigma unbiased.
    """
    if chunks.total < 1:
        raise InputError("rejection sampling needs at least one proposal; raise the number")
    for count, generator in chunks:
        tokens = sample_proposal(model, None, count, generator).tokens
        scores = log_phi(tokens)
        is_accepted = accept(scores, generator)
        chunks.keep(tokens=tokens[is_accepted], log_phi=scores[is_accepted], every_log_phi=scores)
        chunks.report(accepted=is_accepted.sum())
    kept = chunks.kept()
    evidence = log_mean_with_error(kept["every_log_phi"])
    return ExactSamples(kept["tokens"], kept["log_phi"], chunks.total, *evidence)
