"""One population of a saved pair: the weighted particles, what they are worth, and samples drawn from them.

    W_s = sum of W_k over the particles k that are the sequence s,   W = softmax(log_weights) at t = T     [distinct]

The samples are a random part of the final resampling: equally weighted, repeats included, in random order, so that the
first few are no better than the others. K particles, N samples, D distinct sequences, T tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.run.setup import Problem
from tsmc import Population, Trace, tsmc
from tsmc.proposal import Twist
from tsmc.resampling import Scheme
from tsmc.sampler import Sigma
from tsmc.weights import normalise
from twist.potential import each_once


@dataclass(frozen=True)
class Sequence:
    """A distinct sequence among the particles."""

    text: str  # prompt included
    weight: float  # share of the population's weight
    particles: int  # how many of the K weighted particles are this sequence
    copies: int  # how many of the K particles after the final resampling are
    log_phi: float
    score: float  # p(toxic | s), whatever the potential is


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


def distinct_sequences(population: Population, problem: Problem) -> tuple[list[Sequence], Tensor]:
    """The distinct sequences of a single run by descending weight, and the place of every particle in them [K]."""
    tokens, place = population.tokens[0].unique(dim=0, return_inverse=True)  # [D, T], [K]
    place, ancestors = place.cpu(), population.ancestors[0].cpu()
    weights = torch.zeros(len(tokens), dtype=torch.float64)
    if population.log_z.item() > -math.inf:  # else every weight is zero
        weights.index_add_(0, place, normalise(population.log_weights[0].cpu().double()))  # [D]
    texts = problem.potential.texts(tokens)
    columns = (
        texts,
        weights.tolist(),
        place.bincount(minlength=len(tokens)).tolist(),
        place[ancestors].bincount(minlength=len(tokens)).tolist(),
        problem.potential(tokens).tolist(),
        each_once(problem.log_toxicity, texts).exp().tolist(),
    )
    order = weights.argsort(descending=True, stable=True)
    rows = [Sequence(*row) for row in zip(*columns, strict=True)]
    return [rows[i] for i in order.tolist()], order.argsort()[place]


def draw(
    problem: Problem,
    sigma: Sigma,
    twist: Twist,
    particles: int,
    samples: int,
    generator: torch.Generator,
    trace: Trace,
    resample: Scheme,
    ess_threshold: float,
) -> Draws:
    """Run TSMC once with K = particles, recorded by `trace`; keep `samples` of them at random."""
    options = {"resample": resample, "ess_threshold": ess_threshold, "observer": trace}
    population = tsmc(sigma.model, twist, sigma.log_potential, particles, generator, **options)
    distinct, place = distinct_sequences(population, problem)
    final = place[population.ancestors[0].cpu()]  # [K]
    chosen = torch.randperm(particles, generator=generator, device=generator.device)[:samples]
    return Draws(problem.prompt, population, trace, distinct, final[chosen.cpu()].tolist())
