"""The potential that `--potential` names; given several times, the product.

    toxicity, nontoxicity           the classifier's p(toxic | s) or p(not toxic | s) to the power of --beta
    keyword:WORD, regex:PATTERN     the continuation holds the word or a match, else phi = 0
    first-sentence:WORDS            the continuation's first sentence has that many words, else phi = 0
    keyword~C:, regex~C:, first-sentence~C:    the same softened: what misses costs C nats (for each word by which it does)
    FILE.py:NAME                    a function in a file of the user's own, which is run

What follows the first colon is taken as it stands, so patterns need no quoting. A function of the user's own gets N texts,
prompt included, or what its attribute `reads` says, "continuations" or "tokens" (see twist.factors), and returns log phi
as N numbers: a tensor, an array or a list. --beta leaves it alone. log phi may be -inf; it must be at most 0 where exact
samples are drawn by rejection.
"""

import contextlib
import importlib.util
import math
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy
import torch
from torch import Tensor

from eval.run.state import digest_of
from eval.scorers.toxicity import ToxicityScorer
from tinystories.errors import InputError
from twist import first_sentence, keyword, power, regex
from twist.factors import READS, Factor

PATIENCE = 2.0  # seconds for a pattern to be searched in one text


def bounded_search(pattern: re.Pattern, text: str) -> re.Match | None:
    """pattern.search(text); InputError where it takes longer than PATIENCE, as patterns that try all ways do.

    Only a signal reaches a search that is under way: where there are none (Windows, threads), it is not bounded.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return pattern.search(text)

    def give_up(*_) -> NoReturn:
        fault = f"has searched {text!r} for {PATIENCE:g} s"
        raise InputError(
            f"the pattern {pattern.pattern!r} {fault}; simplify it, repetitions inside repetitions above all"
        )

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        return pattern.search(text)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


READY: dict[str, tuple[str, Callable[[str], object], str, Callable[..., Factor]]] = {
    "keyword": ("WORD", str, "a word", keyword),
    "regex": ("PATTERN", str, "a pattern", partial(regex, search=bounded_search)),
    "first-sentence": ("WORDS", int, "a number of words, at least 1", first_sentence),
}
"""Ready factors: what stands behind the colon, its type, what it must be, and the factor made of it and of a strength."""
FORMS = f"toxicity, nontoxicity, {', '.join(f'{name}:{ready[0]}' for name, ready in READY.items())} or FILE.py:NAME"


def make_factors(potential: Sequence[str], beta: float, scorer: ToxicityScorer) -> list[Factor]:
    """The factors that the values of --potential name; InputError where one is not understood."""
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
    if name not in READY or not argument:
        raise InputError(f"--potential {spec}: not understood; give {FORMS}")
    strength = positive(spec, number, float, "a strength above 0 behind the ~") if tilde else math.inf
    _, kind, wanted, make = READY[name]
    value = argument if kind is str else positive(spec, argument, kind, wanted)
    try:
        return make(value, strength)
    except InputError as error:
        raise InputError(f"--potential {spec}: {error}") from error


def positive(spec: str, text: str, kind: type, wanted: str) -> float:
    """The number in a part of --potential; InputError where it is none, or not above zero and finite."""
    try:
        if 0 < (number := kind(text)) < math.inf:
            return number
    except ValueError:
        pass
    raise InputError(f"--potential {spec}: {text!r} will not do; give {wanted}")


def user_file(spec: str) -> tuple[Path, str] | None:
    """File and name of FILE.py:NAME; None for what is no such thing."""
    path, _, name = spec.rpartition(":")
    ready = spec.partition(":")[0].partition("~")[0] in READY
    return (Path(path), name) if path.endswith(".py") and not ready else None


def fingerprints(potential: Sequence[str]) -> list[str]:
    """What the potential depends on: each factor as it was named, a user's file by the sha256 of its content."""
    places = [(spec, user_file(spec)) for spec in potential]
    return [f"{place[1]} of {digest_of(place[0])}" if place else spec for spec, place in places]


def reason(error: BaseException, path: Path) -> str:
    """An error of the user's own code in one line, with the last line of the file that it came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{place}{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def run_file(spec: str, path: Path) -> ModuleType:
    """The module that a user's file makes, run once however many of its functions are named."""
    name = f"potential_{digest_of(path)}"
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(loader)  # dataclasses look their module up there
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            loader.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"--potential {spec}: {path} cannot be run ({reason(error, path.absolute())})") from error
    return module


def user_factor(spec: str, path: Path, name: str) -> Factor:
    """The function of a user's file, what it returns checked; InputError names file, function and what is wrong."""
    if not path.is_file():
        raise InputError(f"--potential {spec}: {path} is no file; give FILE.py:NAME")
    function = getattr(run_file(spec, path), name, None)
    if not callable(function):
        raise InputError(f"--potential {spec}: {path} has no function named {name!r}; give FILE.py:NAME")

    reads = getattr(function, "reads", "texts")
    if reads not in READS:
        raise InputError(f"--potential {spec}: {name}.reads is {reads!r}; give one of {', '.join(READS)}")

    def log_phi(batch: list[str] | Tensor) -> Tensor:
        own = batch.clone() if isinstance(batch, Tensor) else list(batch)  # what the function does to it stays there
        try:
            with contextlib.redirect_stdout(sys.stderr):
                value = function(own)
        except (Exception, SystemExit) as error:
            raise InputError(f"--potential {spec} failed ({reason(error, path.absolute())})") from error
        return checked(spec, value, batch)

    return Factor(log_phi, reads)


def checked(spec: str, value: object, batch: list[str] | Tensor) -> Tensor:
    """log phi [N], float32 and detached, of what a user's function returned for N texts or rows of tokens."""
    try:
        value = torch.as_tensor(numpy.ascontiguousarray(value) if isinstance(value, numpy.ndarray) else value)
        if value.is_complex() or value.is_meta or value.layout != torch.strided:
            raise TypeError("complex, without values, or sparse")
        log_phi = value.detach().float()
    except (TypeError, ValueError, RuntimeError) as error:
        fault = f"returned a {type(value).__name__} that holds no numbers"
        raise InputError(f"--potential {spec} {fault}; return log phi, one number for each text") from error
    if log_phi.shape != (len(batch),):
        fault = f"returned shape {list(log_phi.shape)} for {len(batch)} texts"
        raise InputError(f"--potential {spec} {fault}; return log phi, one number for each text")
    if not bool((log_phi < torch.inf).all()):
        worst = (~(log_phi < torch.inf)).nonzero()[0].item()
        where = repr(batch[worst])[:80] if isinstance(batch, list) else f"tokens {batch[worst].tolist()}"
        raise InputError(
            f"--potential {spec} returned {log_phi[worst].item()} for {where}; log phi must be below infinity"
        )
    return log_phi
