"""What a learner of Algorithm 1 is, and its options.

    line 1   pair  = learner.first_twist()              (p^(0), psi^(0))
    line 3   model = learner.distil(pair, m)            p^(m)
    line 4   pair  = learner.learn_twist(model, m)      (p^(m), psi^(m))

A learner is made of p^(0), log phi, its options, and random streams by name. It knows nothing of
files: the figures of its steps are in `records`. A new one is a file like its neighbours and an
entry of LEARNERS; the fields of its Options become options of the command line.
"""

import abc
from collections.abc import Callable
from typing import Any

from torch import Tensor

from distill.options import check
from distill.pair import Pair
from tinystories.decoder import Conditional
from tsmc.draws import systematic
from tsmc.sampler import Population, Rule
from tsmc.sigma import Sigma, seen_from
from tsmc.streams import Streams, draw_population
from twist.potential import check_potential

AT_END = Rule(systematic, ess_threshold=0.0)  # runs resample when their texts are complete


class Learner(abc.ABC):
    """Lines 1, 3 and 4 of Algorithm 1, and what a run and its table ask of a learner."""

    Options: type  # the dataclass of its options
    generations = 2  # M, unless the user says another
    samples_policy = False  # True: p^(m) is a policy, whose texts no weight corrects

    def __init__(
        self, base: Conditional, log_phi: Callable[[Tensor], Tensor], options: Any, streams: Streams
    ):
        """For p^(0) = base, a language model with its prompt, and log_phi(tokens [N, T]) [N]."""
        check(options)
        self.base = base
        self.log_phi = log_phi
        self.options = options
        self.streams = streams
        self.records: list[dict[str, Any]] = []  # figures of steps, until `Job.keep`
        check_potential(base, log_phi, streams.stream("check"))

    @abc.abstractmethod
    def first_twist(self) -> Pair:
        """Line 1: (p^(0), psi^(0))."""

    @abc.abstractmethod
    def distil(self, pair: Pair, m: int) -> Any:
        """Line 3: p^(m), from (p^(m-1), psi^(m-1))."""

    def learn_twist(self, model: Any, m: int) -> Pair:
        """Line 4: (p^(m), psi^(m)) for p^(m) = model; psi = 1 unless a learner has another."""
        return Pair(model, None)

    @abc.abstractmethod
    def scored(self, m: int) -> int:
        """How many texts phi has scored up to the row of generation m."""

    def sigma(self, model: Any) -> Sigma:
        """The target, as p^(m) = model sees it."""
        return seen_from(model, self.base, self.log_phi)

    @staticmethod
    def rule(options: Any) -> Rule:
        """How runs resample, unless a learner has another rule.

        Static, because `eval.sample` has options but no learner.
        """
        return AT_END

    def population(self, pair: Pair, word: str, m: int, particles: int, runs: int) -> Population:
        """R = runs runs of K = particles of (p^(m), psi^(m)), from the random stream of a word."""
        sigma, rule = self.sigma(pair.model), self.rule(self.options)
        return draw_population(self.streams, word, m, sigma, pair.twist, particles, runs, rule)

    def record(self, phase: str, m: int, **figures: float | Tensor) -> None:
        """Keep the figures of one step of a phase of generation m."""
        numbers = {name: float(value) for name, value in figures.items()}
        self.records.append({"phase": phase, "generation": m} | numbers)

    def state(self) -> dict[str, Tensor]:
        """What the learner needs to go on, beside the last pair."""
        return {}

    def resume(self, state: dict[str, Tensor]) -> None:  # noqa: B027 (most have nothing to do)
        """Go on with a state that was kept."""
