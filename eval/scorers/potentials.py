"""The potential that `--potential` names; given several times, the product.

    toxicity, nontoxicity           the classifier's p(toxic | s) or p(not toxic | s) to the power of --beta
    keyword:WORD, regex:PATTERN     the continuation holds the word or a match, else phi = 0
    first-sentence:WORDS            the continuation's first sentence has that many words, else phi = 0
    keyword~C:, regex~C:, first-sentence~C:    the same softened: what misses costs C nats (for each word by which it does)
    FILE.py:NAME                    a function in a file of the user's own, which is run

What follows the first colon is taken as it stands, so patterns need no quoting. A function of the user's own gets N texts,
prompt included, or what its attribute `reads` says, "continuations" or "tokens" (see twist.potential), and returns log phi
as N numbers: a tensor, an array or a list. --beta leaves it alone. log phi may be -inf; it must be at most 0 where exact
samples are drawn by rejection.
"""

import importlib.util
import math
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from eval.run.state import digest_of
from eval.scorers.toxicity import ToxicityScorer
from tinystories.errors import InputError
from twist import first_sentence, keyword, power, regex
from twist.potential import READS, Factor

FORMS = "toxicity, nontoxicity, keyword:WORD, regex:PATTERN, first-sentence:WORDS or FILE.py:NAME"
READY = ("keyword", "regex", "first-sentence")


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
    strength = math.inf
    if tilde:
        strength = positive(spec, number, float, "a strength above 0 behind the ~")
    if name == "first-sentence":
        return first_sentence(positive(spec, argument, int, "a number of words, at least 1"), strength)
    try:
        return {"keyword": keyword, "regex": regex}[name](argument, strength)
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
            value = function(own)
        except Exception as error:
            raise InputError(f"--potential {spec} failed ({reason(error, path.absolute())})") from error
        return checked(spec, value, batch)

    return Factor(log_phi, reads)


def checked(spec: str, value: object, batch: list[str] | Tensor) -> Tensor:
    """log phi [N], float32 and detached, of what a user's function returned for N texts or rows of tokens."""
    try:
        log_phi = torch.as_tensor(value).detach().float()
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
