"""What a learner of Algorithm 1 is, and its options.

    line 1   pair  = learner.first_twist()              (p^(0), psi^(0))
    line 3   model = learner.distil(pair, m)            p^(m)
    line 4   pair  = learner.learn_twist(model, m)      (p^(m), psi^(m))

A learner is made of p^(0), log phi, its options, random streams by name, and a callback for
progress. It knows nothing of files. A new one is a file like its neighbours and a line of LEARNERS
in `eval/config.py`. The fields of an options class become options of the command line.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tinystories.errors import InputError, shortened
from tsmc.interfaces import BaseModel, Report, ignore
from tsmc.resampling import systematic
from tsmc.runs import Streams, draw_population
from tsmc.sampler import Population, Sigma
from twist.pair import Pair
from twist.potential import check_potential, seen_from


class Learner(abc.ABC):
    """Lines 1, 3 and 4 of Algorithm 1, and what a run and its table ask of a learner."""

    samples_policy = False  # True: its samples are texts of p^(m) alone, which no weight corrects

    def __init__(
        self,
        base: BaseModel,
        log_phi: Callable[[Tensor], Tensor],
        options: Any,
        streams: Streams,
        report: Report = ignore,
    ):
        """For p^(0) = base and log_phi(tokens [N, T]) -> log phi [N]."""
        self.base = base
        self.log_phi = log_phi
        self.options = options
        self.streams = streams
        self.report = report
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
    def scores(self, generations: int) -> int:
        """How many texts phi has scored after so many generations."""

    def sigma(self, model: Any) -> Sigma:
        """The target, as p^(m) = model sees it."""
        return seen_from(model, self.base, self.log_phi)

    @staticmethod
    def rule(options: Any) -> dict[str, Any]:
        """How runs resample, as arguments of `tsmc`."""
        return {"resample": systematic, "ess_threshold": 0.0}

    def population(self, pair: Pair, word: str, m: int, particles: int, runs: int) -> Population:
        """R = runs runs of K = particles of (p^(m), psi^(m)), from the random stream of a word."""
        sigma = self.sigma(pair.model)
        given = (self.streams, word, m, sigma, pair.twist, particles, runs, self.report)
        return draw_population(*given, **self.rule(self.options))

    def state(self) -> dict[str, Tensor]:
        """What the learner needs to go on, beside the last pair."""
        return {}

    def resume(self, state: dict[str, Tensor]) -> None:  # noqa: B027 (most have nothing to do)
        """Go on with a state that was kept."""


def option(default: Any, text: str, low: float = -1e9, high: float = 1e9, choices: Any = ()) -> Any:
    """A dataclass field with its default, a line of help, limits and choices.

    The default also tells the type of the option, or of each of its values if it is a tuple.
    """
    kind = type(default[0] if isinstance(default, tuple) else default)
    metadata = {"help": text, "kind": kind, "limits": (low, high), "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str, value: Any = True) -> str:
    """`--ctl-updates` of ctl_updates, and `--no-surrogate` of a switch that is off."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def check_all(options: Any) -> None:
    """InputError, which names the option, for a value of another type or out of range."""
    for field in dataclasses.fields(options):
        given = getattr(options, field.name)
        values = [given]
        if isinstance(field.default, tuple):
            values = given
            if not isinstance(given, tuple) or not given:
                raise InputError(f"{flag_of(field.name)} is {given!r}; give a list of values")
        kind, choices = field.metadata["kind"], field.metadata["choices"]
        low, high = field.metadata["limits"]
        for value in values:
            fault = f"{flag_of(field.name, value)} is {shortened(repr(value))}"
            is_kind = isinstance(value, (int, float) if kind is float else kind)
            if not is_kind or isinstance(value, bool) != (kind is bool):
                raise InputError(f"{fault}; give a value of type {kind.__name__}")
            if choices and value not in choices:
                raise InputError(f"{fault}; give one of {', '.join(choices)}")
            if kind is str and not value.isprintable():
                raise InputError(f"{fault}; give text that can be printed")
            if kind in (int, float) and not value >= low:  # nor where it is NaN
                raise InputError(f"{fault}; give at least {low}")
            if kind in (int, float) and value > high:
                raise InputError(f"{fault}; give at most {high}")
