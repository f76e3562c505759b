"""The potential that `--potential` names (docs/options.md); several are multiplied.

Everything after the first colon belongs to a pattern. A user's function gets N texts, or what its
attribute `reads` says, and returns log phi, N numbers below infinity, in whatever form. Its
attribute `prefix`, if it has one, is a function of the same, unfinished, that returns log f_t.
"""

import contextlib
import copy
import functools
import io
import math
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.scorers.toxicity import ToxicityScorer
from tinystories.checkpoint import digest_of
from tinystories.errors import InputError, reason_of
from twist.factors import READY, power
from twist.potential import READS, Factor, as_log_phi

CLASSIFIED = ("toxicity", "nontoxicity")
FORMS = f"{', '.join(CLASSIFIED)}, keyword:WORD, regex:PATTERN, without:WORD, first-sentence:WORDS "
FORMS += "or FILE.py:NAME"


def make_factors(potential: Sequence[str], beta: float, scorer: ToxicityScorer) -> list[Factor]:
    """The factors that the values of --potential name; InputError if one is not understood."""
    factors = []
    for spec in potential:
        if spec in CLASSIFIED:
            score = scorer if spec == "toxicity" else scorer.log_nontoxic
            factors.append(power(score, beta))
        else:
            factors.append(rule(spec))
    return factors


def rule(spec: str) -> Factor:
    """The factor of a value of --potential that needs no classifier."""
    return user_factor(spec) if user_file(spec) else ready_factor(spec)


def ready_factor(spec: str) -> Factor:
    """A keyword, a pattern or a length, hard or softened."""
    head, _, argument = spec.partition(":")
    name, tilde, number = head.partition("~")
    try:
        strength = float(number) if tilde else math.inf
        wanted = int(argument) if name == "first-sentence" else argument
        if spec.isalpha():
            raise ValueError(f"for a keyword write keyword:{spec}")
        if not argument or (name == "first-sentence" and not 1 <= wanted <= 10**6):
            raise ValueError("give a word, a pattern or a number of words, at least 1")
        if tilde and not 0 < strength < math.inf:
            raise ValueError("the strength after ~ must be above 0")
        return READY[name](wanted, strength)
    except (KeyError, ValueError) as error:  # InputError is a ValueError
        raise InputError(f"--potential {spec}: {error}; give {FORMS}") from error


def user_file(spec: str) -> tuple[Path, str] | None:
    """File and name of FILE.py:NAME; None for anything else."""
    path, _, name = spec.rpartition(":")
    is_ready = re.split("[:~]", spec)[0] in READY
    return (Path(path), name) if path.endswith(".py") and not is_ready else None


@contextlib.contextmanager
def users_code(spec: str, path: Path) -> Iterator[None]:
    """Whatever a user's code raises becomes an InputError; PyTorch's modes are put back."""
    dtype = torch.get_default_dtype()
    gradients = torch.set_grad_enabled(torch.is_grad_enabled())
    printed = io.StringIO()  # standard output is for results
    here = os.getcwd()
    try:
        with contextlib.redirect_stdout(printed), gradients:
            yield
        if not printed.closed and printed.getvalue():
            print(printed.getvalue(), end="", file=sys.stderr)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
        fault = f"(line {lines[-1]}: {reason_of(error)})" if lines else f"({reason_of(error)})"
        remedy = "NAME must be a function in FILE.py that returns log phi, N numbers below infinity"
        raise InputError(f"--potential {spec} failed {fault}; {remedy}") from error
    finally:
        torch.set_default_dtype(dtype)
        os.chdir(here)


@functools.cache
def run_file(path: Path, digest: str) -> dict[str, Any]:
    """What a user's file defines; executed again only where `digest` has changed."""
    return runpy.run_path(str(path.absolute()), run_name=f"potential_{digest}")


def user_factor(spec: str) -> Factor:
    """The function of a user's file as a factor; InputError for whatever is wrong with either."""
    path, name = user_file(spec)
    try:
        digest = digest_of(path)
    except InputError as error:
        raise InputError(f"--potential {spec}: {error}") from error
    with users_code(spec, path):
        function = run_file(path, digest)[name]
        reads = getattr(function, "reads", "texts")
        prefix = getattr(function, "prefix", None)
        if not callable(function) or reads not in READS:
            raise TypeError(f"{name} must be a function, and its `reads` one of {', '.join(READS)}")
        if not (prefix is None or callable(prefix)):
            raise TypeError(f"{name}.prefix must be a function that returns log f")

    def guarded(function: Callable, part: str, batch: list[str] | Tensor) -> Tensor:
        with users_code(f"{spec}{part}", path):
            given = copy.copy(batch)  # the function may change it
            return as_log_phi(function(given), batch)

    log_prefix = None if prefix is None else functools.partial(guarded, prefix, ".prefix")
    log_phi = functools.partial(guarded, function, "")
    return Factor(log_phi, reads, log_prefix, f"--potential {spec}")
