"""Exact samples of sigma (eq. 2) by rejection: draw s from p, accept with probability phi(s).

    acceptance rate -> Z_sigma = E_p[phi(s)],   log Z_sigma-hat = log mean_n phi(s_n) of all N

The mean of phi varies less than the share accepted. As the number of proposals is fixed in advance,
it is unbiased. N proposals, A accepted, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from tinystories.decoder import Conditional
from tsmc.draws import uniforms
from tsmc.estimate import log_mean_estimate
from tsmc.proposal import sample_proposal
from tsmc.sigma import call_potential
from tsmc.streams import Streams


@dataclass(frozen=True)
class ExactSamples:
    """Accepted sequences, and the evidence as estimated from all proposals."""

    tokens: Tensor  # [A, T]
    log_phi: Tensor  # [A]
    num_proposals: int
    log_z: float
    log_z_std_error: float


def draw_accepted(
    model: Conditional, log_phi: Callable[..., Tensor], count: int, generator: torch.Generator
) -> SimpleNamespace:
    """Of N = count sequences from p those accepted under log_phi(tokens [N, T]) -> [N]: tokens
    [A, T], log_phi [A], and proposed_log_phi [N] of all. ValueError where log phi is above zero."""
    tokens = sample_proposal(model, None, count, generator).tokens
    scores = call_potential(log_phi, tokens)  # [N]
    highest = scores.max().item()
    if highest > 1e-6:
        fault = f"log phi is {highest:.4g} on some sequence, but rejection needs log phi <= 0"
        raise ValueError(f"{fault}; subtract an upper bound, or pass --eval-target-proposals 0")
    uniform = uniforms(count, 1, generator)[:, 0]
    is_accepted = uniform < scores.to(uniform.dtype).exp()  # [N]
    tokens, accepted = tokens[is_accepted], scores[is_accepted]
    return SimpleNamespace(tokens=tokens, log_phi=accepted, proposed_log_phi=scores)


def exact_samples(
    model: Conditional, log_phi: Callable[..., Tensor], streams: Streams, word: str, count: int
) -> ExactSamples:
    """Those accepted of N = count sequences, from the random stream of a word, and the evidence."""
    drawn = streams.draw(word, None, count, partial(draw_accepted, model, log_phi))
    proposed = drawn["proposed_log_phi"]  # [N]
    log_z = log_mean_estimate(proposed)
    tokens, accepted = drawn["tokens"], drawn["log_phi"]  # [A, T], [A]
    return ExactSamples(tokens, accepted, len(proposed), log_z.value, log_z.std_error)
