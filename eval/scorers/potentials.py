"""The potential that `--potential` names (docs/options.md); several are multiplied.

Everything after the first colon belongs to a pattern. A user's function gets N texts, or what its
attribute `reads` says, and returns log phi, N numbers below infinity, in whatever form. Its
attribute `prefix`, if it has one, is a function of the same, unfinished, that returns log f_t;
`hints` are those of `twist.potential.Factor`.
"""

import contextlib
import dataclasses
import inspect
import math
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from eval.scorers.toxicity import ToxicityScorer
from tinystories.errors import InputError, listed, reason_of
from twist.factors import READY, power
from twist.potential import Factor, as_log_phi, factor_of

CLASSIFIED = ("toxicity", "nontoxicity")
SOFTEN = "soften the potential (docs/potentials.md)"  # advice where phi is nearly always 0
FORMS = f"{', '.join(CLASSIFIED)}, keyword:WORD, regex:PATTERN, without:WORD or FILE.py:NAME"


def make_factors(potential: Sequence[str], beta: float, scorer: ToxicityScorer) -> list[Factor]:
    """The factors that the values of --potential name; InputError if one is not understood."""
    factors = []
    for spec in potential:
        if spec in CLASSIFIED:
            score = scorer if spec == "toxicity" else scorer.log_nontoxic
            factors.append(power(score, beta))
        else:
            factors.append(user_factor(spec) if user_file(spec) else ready_factor(spec))
    return factors


def ready_factor(spec: str) -> Factor:
    """A keyword or a pattern, hard or softened."""
    head, _, argument = spec.partition(":")
    name, tilde, number = head.partition("~")
    try:
        if name not in READY:
            raise InputError(f"there is no rule {name!r}")
        if not argument:
            raise InputError("the word or pattern is missing")
        strength = float(number) if tilde else math.inf
        if not strength > 0:
            raise InputError("the strength after ~ must be above 0")
        return READY[name](argument, strength)
    except ValueError as error:  # as every InputError is
        raise InputError(f"--potential {spec}: {error}; give {FORMS}") from error


def user_file(spec: str) -> tuple[Path, str] | None:
    """File and name of FILE.py:NAME; None for anything else."""
    path, _, name = spec.rpartition(":")
    if spec.endswith(".py"):
        path, name = spec, ""
    if not path.endswith(".py") or re.split("[:~]", spec)[0] in READY:
        return None
    return Path(path), name


@contextlib.contextmanager
def users_code(spec: str, path: Path) -> Iterator[None]:
    """Whatever a user's code raises becomes an InputError that names its line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            yield
    except InputError as error:
        raise InputError(f"--potential {spec}: {error}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
        place = f"line {lines[-1]}: " if lines else ""
        fault = f"--potential {spec} failed ({place}{reason_of(error)})"
        remedy = "NAME must be a function in FILE.py that returns log phi, N numbers below infinity"
        raise InputError(f"{fault}; {remedy}") from error


def user_factor(spec: str) -> Factor:
    """The function of a user's file as a factor; InputError for whatever is wrong with either."""
    path, name = user_file(spec)
    with users_code(spec, path):
        defined = runpy.run_path(str(path.absolute()))
        if name not in defined:
            functions = [key for key, value in defined.items() if inspect.isfunction(value)]
            raise InputError(f"give FILE.py:NAME; it defines {listed(functions) or 'no function'}")
        factor = factor_of(defined[name])

    def guarded(function: Callable, part: str, texts: list[str]) -> Tensor:
        with users_code(spec + part, path):
            return as_log_phi(function(texts), texts)

    changes = {"name": f"--potential {spec}", "log_phi": partial(guarded, factor.log_phi, "")}
    if factor.log_prefix is not None:
        changes["log_prefix"] = partial(guarded, factor.log_prefix, ".prefix")
    return dataclasses.replace(factor, **changes)
