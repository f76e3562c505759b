"""Weighted texts from R runs of twisted SMC: `sample(model, potential, pair)`.

Of the weight of all runs, particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

so the more runs, the nearer are draws by W to sigma. Without a pair p^(0) proposes. R runs, K
particles, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinystories.errors import InputError
from tinystories.fast import pack
from tsmc.interfaces import BaseModel
from tsmc.proposal import sequence_log_probs
from tsmc.resampling import systematic
from tsmc.runs import Phases, draw_population
from tsmc.sampler import Population, Step
from tsmc.trace import Trace
from twist.pair import Pair
from twist.potential import TextPotential, each_once, seen_from


@dataclass(frozen=True)
class Drawn:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    scores: dict[str, Tensor]  # "log_phi" [R K], "log_p" [R K] of p^(0), and others if asked for
    log_weights: Tensor  # [R K] float64, log of the share W of each particle
    log_z_hat: float  # log of the mean of Z-hat; runs whose weights are all zero count as zero
    population: Population
    trace: Trace  # of the first chunk of runs
    seed: int  # of `samples`

    @property
    def ess(self) -> float:
        """1 / sum W^2: how many independent samples the weighted texts are worth; 0 if all died."""
        squares = self.log_weights.exp().square().sum().item()
        return 1 / squares if squares else 0.0

    def row(self, k: int) -> dict[str, str | float]:
        """Particle k: its text, its scores, and its weight W."""
        row = {"text": self.texts[k], "weight": self.log_weights[k].exp().item()}
        return row | {name: values[k].item() for name, values in self.scores.items()}

    def samples(self, count: int, generator: torch.Generator | None = None) -> list[dict]:
        """`count` independent draws by the weights, for large R K from sigma; a `row` for each.

        Equal calls give equal draws, others with a `generator` on the CPU. There are none where
        every weight is zero. InputError unless count is a positive number.
        """
        if type(count) is not int or count < 1:
            raise InputError(f"{count!r} samples cannot be drawn; give a whole number from 1 on")
        weights = self.log_weights.exp()
        if not weights.any():
            return []
        generator = generator or torch.Generator().manual_seed(self.seed)
        places = torch.multinomial(weights, count, replacement=True, generator=generator)
        return [self.row(k) for k in places.tolist()]


def sample(
    model: BaseModel,
    potential: TextPotential,
    pair: Pair | None = None,
    particles: int = 50,
    runs: int = 8,
    seed: int = 0,
    scores: dict[str, Callable[[list[str]], Any]] | None = None,
    phases: Phases | None = None,
    **rule: Any,
) -> Drawn:
    """R = runs populations of K = particles of sigma, proportional to p^(0) phi with p^(0) = model.

    `scores` are further functions of N texts that give N numbers; `phases` says how many rows are
    drawn at a time, and where; `rule` has options of `tsmc`. InputError where all weights are zero.
    """
    pair = pair or Pair(model, None)
    phases = phases or Phases(seed, model.output_embeddings.device)
    sigma = seen_from(pair.model, model, potential)
    twist = None if pair.twist is None else pack(pair.twist)
    trace = Trace()

    def observe(step: Step) -> None:
        if step.tokens.shape[-1] > len(trace.steps):  # in the first chunk of runs
            trace(step)

    rule = {"resample": systematic, "ess_threshold": 0.0, "observer": observe} | rule
    population = draw_population(phases, "sample", None, sigma, twist, particles, runs, **rule)
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    texts = potential.texts(tokens)
    found = {"log_phi": potential(tokens).cpu()}
    found["log_p"] = sequence_log_probs(model.packed(), tokens).cpu()
    for name, function in (scores or {}).items():
        found[name] = each_once(function, texts)
    log_weights = population.shares().flatten().log()
    log_z_hat = population.log_mean_z()
    return Drawn(texts, found, log_weights, log_z_hat, population, trace, phases.seed)
