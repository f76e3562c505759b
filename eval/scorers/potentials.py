"""The potential that `--potential` names; given several times, the product of all of them.

    toxicity, nontoxicity           the classifier's p(toxic | s) or p(not toxic | s), to the power
                                    of --beta
    keyword:WORD, regex:PATTERN     the continuation holds the word or a match, else phi = 0
    first-sentence:WORDS            its first sentence has so many words, else phi = 0
    keyword~C:, regex~C:, first-sentence~C:    softened: a miss costs C nats, or C nats a word
    FILE.py:NAME                    a function in a file of the user's own, which is executed

Patterns need no quoting: everything after the first colon belongs to them. A user's function gets N
texts, or what its attribute `reads` says, "continuations" or "tokens", and returns log phi as N
numbers below infinity: a tensor, an array or a list. --beta does not apply to it. Where exact
samples are drawn by rejection, log phi must be at most 0.
"""

import contextlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy
import torch
from torch import Tensor

from eval.scorers.toxicity import ToxicityScorer
from tinystories.checkpoint import digest_of
from tinystories.errors import InputError
from twist.potential import READS, Factor, first_sentence, keyword, power, regex

READY = {"keyword": keyword, "regex": regex, "first-sentence": first_sentence}
FORMS = "toxicity, nontoxicity, keyword:WORD, regex:PATTERN, first-sentence:WORDS or FILE.py:NAME"
MOST_WORDS = 10**6


def make_factors(potential: Sequence[str], beta: float, scorer: ToxicityScorer) -> list[Factor]:
    """The factors that the values of --potential name; InputError if one is not understood."""
    classifier = {"toxicity": scorer, "nontoxicity": scorer.log_nontoxic}
    factors = []
    for spec in potential:
        if spec in classifier:
            factors.append(power(classifier[spec], beta))
        elif (place := user_file(spec)) is not None:
            factors.append(user_factor(spec, *place))
        else:
            factors.append(ready_factor(spec))
    return factors


def ready_factor(spec: str) -> Factor:
    """A keyword, a pattern or a length, hard or softened."""
    head, _, argument = spec.partition(":")
    name, tilde, number = head.partition("~")
    try:
        strength = float(number) if tilde else math.inf
        wanted = int(argument) if name == "first-sentence" else argument
        if not argument or (name == "first-sentence" and not 1 <= wanted <= MOST_WORDS):
            raise ValueError("give a word, a pattern or a number of words, at least 1")
        if tilde and not 0 < strength < math.inf:
            raise ValueError("the strength after ~ must be above 0")
        return READY[name](wanted, strength)
    except (KeyError, ValueError) as error:  # InputError is a ValueError
        fault = "no such potential" if isinstance(error, KeyError) else error
        raise InputError(f"--potential {spec}: {fault}; give {FORMS}") from error


def user_file(spec: str) -> tuple[Path, str] | None:
    """File and name of FILE.py:NAME; None for anything else."""
    path, _, name = spec.rpartition(":")
    is_ready = spec.partition(":")[0].partition("~")[0] in READY
    return (Path(path), name) if path.endswith(".py") and not is_ready else None


def fingerprints(potential: Sequence[str]) -> list[str]:
    """What the potential depends on: the names of its factors, and the sha256 of a user's file."""
    prints = []
    for spec in potential:
        place = user_file(spec)
        prints.append(spec if place is None else f"{place[1]} of {digest_of(place[0])}")
    return prints


@contextlib.contextmanager
def users_code(spec: str, path: Path) -> Iterator[None]:
    """Everything that a user's code or its result raises becomes an InputError with the line.

    What the code prints goes to standard error, and torch's default type and gradient mode are put
    back.
    """
    default, grad_mode = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = "no message"
        with contextlib.suppress(BaseException):  # of an error that cannot be shown either
            text = str(error).strip().splitlines()[0][:300]
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(path.absolute())]
        place = f"line {lines[-1]}: " if lines else ""
        fault = f"--potential {spec} failed ({place}{type(error).__name__}: {text})"
        remedy = "NAME must be a function in FILE.py that returns log phi, N numbers below infinity"
        raise InputError(f"{fault}; {remedy}") from error
    finally:
        torch.set_default_dtype(default)
        torch.set_grad_enabled(grad_mode)


def run_file(path: Path) -> ModuleType:
    """The module that a user's file defines, executed once unless the file has changed."""
    name = f"potential_{digest_of(path)}"
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, path.absolute())
        sys.modules[name] = importlib.util.module_from_spec(found)  # dataclasses look it up there
        try:
            found.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def user_factor(spec: str, path: Path, name: str) -> Factor:
    """The function of a user's file as a factor; InputError for whatever is wrong with either."""
    with users_code(spec, path):
        function = getattr(run_file(path), name)
        reads = getattr(function, "reads", "texts")
        if not callable(function) or reads not in READS:
            raise TypeError(f"{name} must be a function, and its `reads` one of {', '.join(READS)}")

    def log_phi(batch: list[str] | Tensor) -> Tensor:
        own = batch.clone() if isinstance(batch, Tensor) else list(batch)  # it may change this copy
        with users_code(spec, path):
            return checked(function(own), batch)

    return Factor(log_phi, reads)


def checked(value: object, batch: list[str] | Tensor) -> Tensor:
    """log phi [N], float32, of what a user's function returned; any exception if it cannot be."""
    if not isinstance(value, Tensor):
        value = torch.as_tensor(numpy.array(value))
    if value.is_complex() or value.shape != (len(batch),):
        raise ValueError(f"{value.dtype} of shape {list(value.shape)} for {len(batch)} texts")
    log_phi = value.detach().float()
    for number, read in zip(log_phi.tolist(), batch, strict=True):
        if not number < math.inf:
            raise ValueError(f"{number} for {str(read)[:80]!r}")
    return log_phi
