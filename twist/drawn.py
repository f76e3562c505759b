"""Weighted texts from R runs of twisted SMC: `sample(model, potential, pair)`.

Of the weight of all runs, particle k of run r has the share

    W_rk = Z-hat_r / (sum over all runs of Z-hat) * softmax(log_weights_r)_k

so the more runs, the nearer are draws by W to sigma. Without a pair p^(0) proposes. R runs, K
particles, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.categorical import uniforms
from tsmc.estimate import Estimate, pareto_k
from tsmc.interfaces import LanguageModel
from tsmc.proposal import sequence_log_probs
from tsmc.rejection import log_mean_with_error
from tsmc.resampling import invert, systematic
from tsmc.runs import Streams, draw_population
from tsmc.sampler import Population, Step
from tsmc.trace import Trace
from twist.pair import Pair
from twist.potential import TextPotential, check_potential, each_once, seen_from


@dataclass(frozen=True)
class Drawn:
    """What R runs of K particles have given: weighted texts, and an estimate of the evidence."""

    texts: list[str]  # [R K], prompt included
    scores: dict[str, Tensor]  # "log_phi" [R K], "log_p" [R K] of p^(0), and others if asked for
    log_weights: Tensor  # [R K] float64, log of the share W of each particle
    population: Population
    trace: Trace  # of the first chunk of runs
    seed: int  # of `samples`

    @property
    def ess(self) -> float:
        """1 / sum W^2: how many independent samples the texts are worth at most.

        Texts of one run that has resampled before the end share beginnings, which it ignores.
        """
        return 1 / self.log_weights.exp().square().sum().item()

    @property
    def pareto_k(self) -> float:
        """How heavy the tail of the weights is (`tsmc/estimate.py`); it too ignores beginnings."""
        return pareto_k(self.log_weights)

    def warning(self) -> str:
        """A line where the weights have too heavy a tail for estimates and their errors, or ""."""
        if not self.pareto_k > 0.7:  # nor where it is NaN
            return ""
        shape = f"The largest weights are too far apart (Pareto k {self.pareto_k:.2f})"
        return f"{shape}: estimates may be further off than their errors say; draw more, or train"

    def samples(self, count: int, generator: torch.Generator | None = None) -> list[dict]:
        """`count` independent draws by the weights, for large R K from sigma: text, W and scores.

        Equal calls give equal draws, others with a `generator` on the CPU. InputError unless count
        is at least 1.
        """
        if count < 1:
            raise InputError(f"{count} samples cannot be drawn; give a whole number from 1 on")
        generator = generator or torch.Generator().manual_seed(self.seed)
        places = invert(self.log_weights.exp()[None], uniforms(1, count, generator).double())[0]
        rows = []
        for k in places.tolist():
            row = {"text": self.texts[k], "weight": self.log_weights[k].exp().item()}
            rows.append(row | {name: values[k].item() for name, values in self.scores.items()})
        return rows

    def evidence(self) -> Estimate:
        """log of the mean of Z-hat over the runs, with its error; a dead run counts as zero.

        Its 95 % interval holds less often where log Z-hat differs much between runs: in worlds of
        729 texts, with 8 runs that differed by .2, .4 and 1.1, in .91, .87 and .42 of all cases.
        And no rule can know of a part of sigma that no draw has met; see `warning`, too.
        """
        runs = self.population.log_z
        return Estimate(*log_mean_with_error(runs), max(1.0, len(runs) - 1.0))

    def probability(self, event: Callable[[str], float]) -> Estimate:
        """P(event(text)) under sigma: the share of the weight, with its error over runs.

        Where event gives numbers from 0 to 1 instead of true and false, it is their expectation.
        `half_width()` is half of its 95 % interval, as good as that of `evidence`. The error is at
        least that of ESS independent texts, because runs agree too well where a few texts have
        nearly all the weight.
        """
        shares = self.log_weights.exp().view_as(self.population.log_weights)  # [R, K]
        found = [event(text) for text in self.texts]
        if not all(isinstance(number, SupportsFloat) and 0 <= number <= 1 for number in found):
            raise InputError("the event is not true, false or a number from 0 to 1; return one")
        holds = shares.new_tensor([float(number) for number in found]).view_as(shares)
        value = (shares * holds).sum().item()
        residuals = (shares * (holds - value)).sum(1)  # [R] of the ratio of two means
        error = math.sqrt(len(shares)) * residuals.std().item() if len(shares) > 1 else math.inf
        # The second term is what remains where the event holds for none of the texts, or for all.
        least = math.sqrt(max(0.0, value * (1 - value)) / self.ess + 1 / self.ess**2)
        return Estimate(value, max(error, least), max(1.0, len(shares) - 1.0))


def sample(
    model: LanguageModel,
    potential: TextPotential,
    pair: Pair | None = None,
    particles: int = 50,
    runs: int = 8,
    seed: int = 0,
    scores: dict[str, Callable[[list[str]], Any]] | None = None,
    **rule: Any,
) -> Drawn:
    """R = runs populations of K = particles of sigma, proportional to p^(0) phi with p^(0) = model.

    `scores` are further functions of N texts that give N numbers; `rule` has options of `tsmc`,
    whose threshold is 0 by default. InputError for a potential that depends on the other texts, and
    where all weights are zero.
    """
    assert isinstance(potential, TextPotential), "give TextPotential([log_phi], decode, prompt)"
    for name, number in (("particles", particles), ("runs", runs)):
        if number < 1:
            raise InputError(f"{name} is {number}; give a whole number of at least 1")
    streams = Streams(seed, model.decoder(1).hidden.device)
    check_potential(model, potential, streams.stream("check"))
    pair = pair or Pair(model, None)
    sigma = seen_from(pair.model, model, potential)
    trace = Trace()

    def observe(step: Step) -> None:
        if step.tokens.shape[-1] > len(trace.steps):  # in the first chunk of runs
            trace(step)

    rule = {"resample": systematic, "ess_threshold": 0.0, "observer": observe} | rule
    sizes = (particles, runs)
    population = draw_population(streams, "sample", None, sigma, pair.twist, *sizes, **rule)
    tokens = population.tokens.flatten(0, 1)  # [R K, T]
    texts = potential.texts(tokens)
    found = {"log_phi": potential.of_texts(texts)}
    found["log_p"] = sequence_log_probs(model, tokens).cpu()
    for name, function in (scores or {}).items():
        found[name] = each_once(function, texts)
    return Drawn(texts, found, population.shares().flatten().log(), population, trace, seed)
