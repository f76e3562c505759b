"""One population of a saved pair: the weighted particles, what they are worth, and samples drawn from them.

    W_s = sum of W_k over the particles k that are the sequence s,   W = softmax(log_weights) at t = T     [distinct]

The samples are a random part of the final resampling: equally weighted, repeats included, in random order, so that the
first few are no better than the others. K particles, N samples, D distinct sequences, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.ingredients import Ingredients
from eval.saved import Pair
from tsmc import SCHEMES, Population, Trace, tsmc
from tsmc.weights import normalise


@dataclass(frozen=True)
class Sequence:
    """A distinct sequence among the particles."""

    text: str  # prompt included
    weight: float  # share of the population's weight
    particles: int  # how many of the K weighted particles are this sequence
    copies: int  # how many of the K particles after the final resampling are
    log_phi: float
    score: float  # what phi is made of: p(toxic | s)


@dataclass(frozen=True)
class Draws:
    """A population, its distinct sequences by descending weight, and samples as places in that list."""

    prompt: str
    population: Population
    trace: Trace
    distinct: list[Sequence]
    samples: list[int]

    @property
    def dead(self) -> bool:
        """Whether every weight is zero: then nothing was drawn from sigma."""
        return self.population.log_z.item() == -torch.inf


def distinct_sequences(population: Population, given: Ingredients) -> tuple[list[Sequence], Tensor]:
    """The distinct sequences of a single run by descending weight, and the place of every particle in them [K]."""
    tokens, place = population.tokens[0].unique(dim=0, return_inverse=True)  # [D, T], [K]
    weights = torch.zeros(len(tokens), dtype=torch.float64, device=place.device)
    weights.index_add_(0, place, normalise(population.log_weights[0].double()))  # [D]
    columns = (
        given.potential.texts(tokens),
        weights.tolist(),
        place.bincount(minlength=len(tokens)).tolist(),
        place[population.ancestors[0]].bincount(minlength=len(tokens)).tolist(),
        given.potential(tokens).double().tolist(),
        given.potential.log_score(tokens).double().exp().tolist(),
    )
    order = weights.argsort(descending=True, stable=True)
    rows = [Sequence(*row) for row in zip(*columns, strict=True)]
    return [rows[i] for i in order.tolist()], order.argsort()[place]


def draw(
    pair: Pair,
    given: Ingredients,
    prompt: str,
    particles: int,
    samples: int,
    generator: torch.Generator,
    resampling: str,
    ess_threshold: float,
    trace: Trace,
) -> Draws:
    """Run TSMC once, recorded by `trace`, and keep `samples` of its K = particles at random."""
    options = {"resample": SCHEMES[resampling], "ess_threshold": ess_threshold, "observer": trace}
    population = tsmc(pair.model, pair.twist, pair.log_potential, particles, generator, **options)
    distinct, place = distinct_sequences(population, given)
    final = place[population.ancestors[0]]  # [K]
    chosen = torch.randperm(particles, generator=generator, device=generator.device)[:samples]
    return Draws(prompt, population, trace, distinct, final[chosen].tolist())
