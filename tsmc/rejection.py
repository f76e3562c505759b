"""Exact samples of sigma by rejection: draw s from p, accept with probability phi(s), which never exceeds one.

    acceptance rate  ->  Z_sigma = E_p[phi(s)],   log Z_sigma-hat = log mean_n phi(s_n) over all N proposals

The mean of phi itself estimates Z_sigma with a smaller variance than the share accepted. N proposals, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.categorical import uniforms
from tsmc.proposal import LanguageModel, sample_proposal


@dataclass
class Rejection:
    """Accepted sequences [A, T] with their log phi [A], and what all proposals say of the evidence."""

    tokens: Tensor
    log_phi: Tensor
    num_proposals: int
    log_z: float
    log_z_std_error: float


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
        less = "do without exact samples by --eval-target-proposals 0 (TSMC needs no bound, only KL(sigma||q) does)"
        raise InputError(f"{why}; subtract an upper bound from log phi, which leaves sigma as it is, or {less}")
    uniform = uniforms(len(log_phi), 1, log_phi, generator)[:, 0]
    return uniform < log_phi.to(uniform.dtype).exp()


@dataclass
class Proposals:
    """N base samples [N, T], their log phi [N], and which of them were accepted [N]."""

    tokens: Tensor
    log_phi: Tensor
    accepted: Tensor


def propose_and_accept(
    model: LanguageModel, log_phi: Callable[[Tensor], Tensor], count: int, generator: torch.Generator
) -> Proposals:
    """Draw N = count sequences from p and accept each with probability phi."""
    tokens = sample_proposal(model, None, count, generator).tokens
    scores = log_phi(tokens)
    return Proposals(tokens, scores, accept(scores, generator))


def rejection_sample(
    model: LanguageModel,
    log_phi: Callable[[Tensor], Tensor],
    num_proposals: int,
    generator: torch.Generator,
    chunk: int = 1000,
) -> Rejection:
    """Draw N = num_proposals sequences from p in chunks and keep those accepted under log_phi(tokens [B, T]) -> [B].

    The number of proposals is fixed in advance, which keeps the estimate of Z_sigma unbiased.
    """
    if num_proposals < 1 or chunk < 1:
        raise InputError("rejection sampling needs at least one proposal and a chunk of at least one; raise the number")
    kept, kept_log_phi, every_log_phi = [], [], []
    for start in range(0, num_proposals, chunk):
        part = propose_and_accept(model, log_phi, min(chunk, num_proposals - start), generator)
        kept.append(part.tokens[part.accepted])
        kept_log_phi.append(part.log_phi[part.accepted])
        every_log_phi.append(part.log_phi)
    log_z, error = log_mean_with_error(torch.cat(every_log_phi))
    return Rejection(torch.cat(kept), torch.cat(kept_log_phi), num_proposals, log_z, error)
