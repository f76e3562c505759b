"""Exact samples of sigma (eq. 2) by rejection: draw s from p, accept with probability phi(s).

    acceptance rate -> Z_sigma = E_p[phi(s)],   log Z_sigma-hat = log mean_n phi(s_n) of all N

The mean of phi varies less than the share accepted. N proposals, A accepted, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Generator, Tensor

from tinystories.decoder import Conditional
from tsmc.draws import uniforms
from tsmc.estimate import log_mean_estimate
from tsmc.proposal import sample_proposal
from tsmc.streams import Streams


@dataclass(frozen=True)
class ExactSamples:
    """Accepted sequences, and the evidence as estimated from all proposals."""

    tokens: Tensor  # [A, T]
    log_phi: Tensor  # [A]
    num_proposals: int
    log_z: float
    log_z_std_error: float


def draw_accepted(model: Conditional, log_phi: Callable, count: int, generator: Generator) -> Any:
    """Of N = count sequences from p those accepted, and log phi of all; ValueError for phi > 1."""
    tokens = sample_proposal(model, None, count, generator).tokens  # [N, T]
    proposed = log_phi(tokens)  # [N]
    if proposed.max() > 1e-6:
        fault = f"log phi is {proposed.max():.4g} on some text, and rejection needs at most 0"
        raise ValueError(f"{fault}: subtract an upper bound, or pass --eval-target-proposals 0")
    is_accepted = uniforms(count, 1, generator)[:, 0] < proposed.double().exp()  # [N]
    tokens, accepted = tokens[is_accepted], proposed[is_accepted]  # [A, T], [A]
    return SimpleNamespace(tokens=tokens, log_phi=accepted, proposed=proposed)


def exact_samples(
    model: Conditional, log_phi: Callable, streams: Streams, word: str, count: int
) -> ExactSamples:
    """Those accepted of N = count sequences, from the random stream of a word, and the evidence."""
    drawn = streams.draw(word, None, count, partial(draw_accepted, model, log_phi))
    log_z = log_mean_estimate(drawn.proposed)
    return ExactSamples(drawn.tokens, drawn.log_phi, count, log_z.value, log_z.std_error)
