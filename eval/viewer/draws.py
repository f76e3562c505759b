"""Runs of a saved pair: the weighted particles, what they are worth, and samples drawn from them.

    W_s = sum over the particles k of runs r that are the sequence s of  Z-hat_r / sum Z-hat * softmax(log_weights_r)_k

Each sample is a random part of the final resampling of a run that is drawn by its Z-hat: repeats included, in random order,
so that the first few are no better than the others. R runs, K particles, N samples, D distinct sequences, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.run.setup import Problem
from tsmc import Chunks, Population, Trace, tsmc
from tsmc.interfaces import Twist
from tsmc.resampling import Scheme
from tsmc.sampler import Sigma
from tsmc.weights import normalise
from twist.factors import each_once


@dataclass(frozen=True)
class Sequence:
    """A distinct sequence among the particles."""

    text: str  # prompt included
    weight: float  # share of the population's weight
    particles: int  # how many of the R K weighted particles are this sequence
    copies: int  # how many of the R K particles after the final resampling are
    log_phi: float
    score: float  # p(toxic | s), whatever the potential is


@dataclass(frozen=True)
class Draws:
    """A population, its distinct sequences by descending weight, and samples as places in that list.

    `trace` is that of the first run.
    """

    prompt: str
    population: Population
    trace: Trace
    distinct: list[Sequence]
    samples: list[int]

    @property
    def dead_runs(self) -> int:
        """How many runs have weights that are all zero."""
        return (~self.population.is_alive()).sum().item()

    @property
    def dead(self) -> bool:
        """Whether every run is dead: then nothing was drawn from sigma."""
        return self.dead_runs == len(self.population.log_z)


def distinct_sequences(population: Population, problem: Problem) -> tuple[list[Sequence], Tensor]:
    """The distinct sequences of all runs by descending weight, and the place of every particle in them [R, K]."""
    shape = population.log_weights.shape
    tokens, place = population.tokens.flatten(0, 1).unique(dim=0, return_inverse=True)  # [D, T], [R K]
    place, ancestors = place.cpu(), population.ancestors.cpu()
    weights = torch.zeros(len(tokens), dtype=torch.float64)
    weights.index_add_(0, place, population.shares().flatten())  # [D]
    texts = problem.potential.texts(tokens)
    columns = (
        texts,
        weights.tolist(),
        place.bincount(minlength=len(tokens)).tolist(),
        place.view(shape).gather(1, ancestors).flatten().bincount(minlength=len(tokens)).tolist(),
        problem.potential(tokens).tolist(),
        each_once(problem.log_toxicity, texts).exp().tolist(),
    )
    order = weights.argsort(descending=True, stable=True)
    rows = [Sequence(*row) for row in zip(*columns, strict=True)]
    return [rows[i] for i in order.tolist()], order.argsort()[place].view(shape)


def choose(population: Population, place: Tensor, samples: int, generator: torch.Generator) -> list[int]:
    """Places of N = samples sequences: each from a run drawn by Z-hat, there from its final resampling, none of it twice."""
    runs, particles = place.shape
    final = place.gather(1, population.ancestors.cpu())  # [R, K]
    orders = [torch.randperm(particles, generator=generator, device=generator.device).tolist() for _ in range(runs)]
    shares = normalise(population.log_z.double()).to(generator.device)
    drawn = torch.multinomial(shares, samples, replacement=True, generator=generator)
    return [final[run, orders[run].pop()].item() for run in drawn.tolist()]


def describe(problem: Problem, population: Population, trace: Trace, samples: int, generator: torch.Generator) -> Draws:
    """The distinct sequences of a population, and `samples` of them at random, at most K."""
    distinct, place = distinct_sequences(population, problem)
    return Draws(problem.prompt, population, trace, distinct, choose(population, place, samples, generator))


def draw(
    problem: Problem,
    sigma: Sigma,
    twist: Twist,
    particles: int,
    samples: int,
    generator: torch.Generator,
    trace: Trace,
    others: Chunks,
    **resampling: Scheme | float,
) -> tuple[Draws, Draws]:
    """One run of TSMC with K = particles, recorded by `trace`, and the same run pooled with `others`."""
    first = tsmc(sigma.model, twist, sigma.log_potential, particles, generator, observer=trace, **resampling)
    for runs, stream in others:
        population = tsmc(sigma.model, twist, sigma.log_potential, particles, stream, runs, **resampling)
        others.keep(**vars(population))
    shown = describe(problem, first, trace, samples, generator)
    if others.total == 0:
        return shown, shown
    kept = others.kept()
    pooled = Population(**{name: torch.cat([value, kept[name]]) for name, value in vars(first).items()})
    return shown, describe(problem, pooled, trace, samples, generator)
