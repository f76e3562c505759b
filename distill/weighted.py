"""Weighted texts from R runs of twisted SMC: `sample(model, potential, pair)`.

Of the weight of all runs, particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

so the more runs, the nearer are draws by W to sigma. Without a pair forced draws propose
(`pooled/forced.py`) where the potential has hints, and p^(0) where it has none. R runs, K
particles, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from distill.learner import AT_END
from distill.pair import Pair
from distill.pooled.pool import draw_round
from distill.tail import pareto_k
from tinystories.decoder import Conditional
from tsmc.draws import effective_sample_size, invert, log_mean_exp, normalise, systematic, uniforms
from tsmc.estimate import Estimate, log_mean_estimate
from tsmc.proposal import sequence_log_probs
from tsmc.sampler import Population, Rule, threshold_of
from tsmc.sigma import seen_from
from tsmc.streams import Streams, draw_population
from twist.guards import call_users, check_equal, each_once
from twist.potential import TextPotential, check_potential

LARGE_DOF = 1000.0  # Student's t is then the normal distribution


@dataclass(frozen=True)
class Weighted:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    scores: dict[str, Tensor]  # "log_phi" [R K], "log_p" [R K] of p^(0), and others if asked for
    log_weights: Tensor  # [R K] float64, log of the share W of each particle
    population: Population
    is_independent: bool  # whether the particles of a run are, because none resampled before T
    seed: int  # of `samples`

    @property
    def ess(self) -> float:
        """1 / sum W^2: how many independent samples the texts are worth at most.

        Texts of one run that has resampled before the end share beginnings, which it ignores.
        """
        return 1 / self.log_weights.exp().square().sum().item()

    @property
    def pareto_k(self) -> float:
        """How heavy the tail of the weights is (`tail.py`); it too ignores beginnings."""
        return pareto_k(self.log_weights)

    def warning(self) -> str:
        """A line where the weights have too heavy a tail for estimates and their errors, or ""."""
        # Where most texts count alike, a few weights that differ say nothing of a tail.
        if self.ess > len(self.texts) / 2 or not self.pareto_k > 0.7:  # nor where it is NaN
            return ""
        shape = f"The largest weights are too far apart (Pareto k {self.pareto_k:.2f})"
        return f"{shape}: estimates may be further off than their errors say; draw more, or train"

    def samples(self, count: int, generator: torch.Generator | None = None) -> list[dict]:
        """`count` >= 1 independent draws by the weights, for large R K from sigma: text, W, scores.

        Equal calls give equal draws, others with a `generator` on the CPU.
        """
        if count < 1:
            raise ValueError(f"{count} samples cannot be drawn; give a whole number from 1 on")
        generator = generator or torch.Generator().manual_seed(self.seed)
        places = invert(self.log_weights.exp()[None], uniforms(1, count, generator).double())[0]
        rows = []
        for k in places.tolist():
            row = {"text": self.texts[k], "weight": self.log_weights[k].exp().item()}
            rows.append(row | {name: values[k].item() for name, values in self.scores.items()})
        return rows

    def evidence(self) -> Estimate:
        """log of the mean of Z-hat over the runs, with its error; a dead run counts as zero.

        Independent particles count one by one. Its 95 % interval holds less often where the weights
        have heavy tails, and no rule can know of a part of sigma that no draw has met: see
        `warning`, and docs/api.md for its coverage.
        """
        if self.is_independent:  # as many degrees of freedom as effective texts
            return log_mean_estimate(self.population.log_weights.flatten(), self.ess)  # [R K]
        return log_mean_estimate(self.population.log_z)  # [R]

    def probability(self, event: Callable[[str], float]) -> Estimate:
        """P(event(text)) under sigma: the share of the weight, with its error.

        Where event gives numbers from 0 to 1 instead of true and false, it is their expectation.
        The error is that over runs, or over independent particles. It is at least that of ESS
        independent texts, because runs agree too well where a few texts have nearly all the weight.
        """
        shares = self.log_weights.exp().view_as(self.population.log_weights)  # [R, K]
        found = [call_users("the event", event, text) for text in self.texts]
        if not all(isinstance(x, SupportsFloat) and 0 <= float(x) <= 1 for x in found):
            raise ValueError("the event is not true, false or a number from 0 to 1; return one")
        holds = shares.new_tensor([float(number) for number in found]).view_as(shares)
        value = min(1.0, (shares * holds).sum().item())
        residuals = shares * (holds - value)  # [R, K] of the ratio of two means
        residuals = residuals.flatten() if self.is_independent else residuals.sum(1)
        count = len(residuals)
        error = math.sqrt(count) * residuals.std().item() if count > 1 else math.inf
        # This remains where the event holds for none of the texts, or for all.
        least = math.sqrt(max(0.0, value * (1 - value)) / self.ess + 1 / self.ess**2)
        by_draws = Estimate(value, error, max(1.0, count - 1.0), 0.0, 1.0)
        by_ess = Estimate(value, least, LARGE_DOF, 0.0, 1.0)
        return max(by_draws, by_ess, key=Estimate.half_width)


def forced_population(
    streams: Streams, model: Conditional, potential: TextPotential, particles: int, runs: int
) -> Population:
    """R = runs runs of K = particles forced draws with the weights p phi / q."""
    hints = potential.hints  # made of texts anew whenever they are asked for

    def draw(size: int, generator: torch.Generator) -> Population:
        total = size * particles  # N
        drawn = draw_round(model, model, potential, total, generator, hints)
        # Plain draws come first; in any order each run has its share of them, and of all hints.
        order = torch.randperm(total, generator=generator, device=drawn.tokens.device)
        parts = (rows[order].unflatten(0, (size, particles)) for rows in vars(drawn).values())
        tokens, log_weights, log_phi = parts  # [R, K, T], [R, K], [R, K]
        ancestors = systematic(normalise(log_weights), generator)  # [R, K]
        samples = tokens[torch.arange(size)[:, None], ancestors]
        numbers = log_mean_exp(log_weights), effective_sample_size(log_weights)  # [R], [R]
        return Population(tokens, log_phi, log_weights, ancestors, samples, *numbers)

    population = Population(**streams.draw("forced draws", None, runs, draw, particles))
    if not population.is_alive().any():
        fault = "all forced draws have weight zero; see whether one text can satisfy all factors"
        raise ValueError(f"{fault}, draw more, or soften the potential")
    return population


def sample(
    model: Conditional,
    potential: TextPotential,
    pair: Pair | None = None,
    particles: int = 50,
    runs: int = 8,
    seed: int = 0,
    scores: dict[str, Callable[[list[str]], Any]] | None = None,
    rule: Rule | None = None,
) -> Weighted:
    """R = runs runs of K = particles of sigma, proportional to p^(0) phi with p^(0) = model.

    `scores` are further functions of N texts that give N numbers. Runs resample by a rule, at T
    alone by default. ValueError for a potential that depends on the other texts or on earlier
    calls, and where all weights are zero.
    """
    assert isinstance(potential, TextPotential), "give TextPotential([log_phi], decode, prompt)"
    streams = Streams(seed, model.prompt.device)
    check_potential(model, potential, streams.stream("check"))
    is_forced = pair is None and bool(potential.hints)
    pair = pair or Pair(model, None)
    if is_forced:
        if rule is not None:
            fault = "forced draws resample at the end alone"
            raise ValueError(f"{fault}; leave out the resampling scheme and the threshold")
        is_independent = True
        population = forced_population(streams, model, potential, particles, runs)
    else:
        rule = rule or AT_END
        sigma = seen_from(pair.model, model, potential)
        is_independent = threshold_of(sigma, rule) == 0
        given = (sigma, pair.twist, particles, runs, rule)
        population = draw_population(streams, "sample", None, *given)
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    texts = potential.texts(tokens)
    log_phi = potential(tokens).cpu()
    log_p = sequence_log_probs(model, tokens).cpu()
    again = log_phi
    if pair.model is not model:  # the population has log phi^(m)
        again = log_phi + log_p - sequence_log_probs(pair.model, tokens).cpu()
    check_equal(population.log_phi.flatten().cpu().double(), again.double(), texts, potential)
    found = {"log_phi": log_phi, "log_p": log_p}
    for name, function in (scores or {}).items():
        found[name] = each_once(function, texts, name)
    log_weights = population.shares().flatten().log()
    return Weighted(texts, found, log_weights, population, is_independent, seed)
