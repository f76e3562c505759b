"""Guards of functions that users write: what they return is checked, and what they raise is told.

A factor of a potential, an event of `Weighted.probability`, or a score of texts is called here and
nowhere else. Whatever goes wrong inside becomes a ValueError that names the function, the line in
its file, and the text at fault. N texts.
"""

import contextlib
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

ROUNDING = 0.1  # relative error of log phi: a network in half precision has as much
REPEATED = 1e-3  # that of two equal calls


def working_directory() -> str:
    """The root where the directory has been deleted."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


def set_default_device(device: torch.device) -> None:
    """None for the CPU, since any other call slows all that follow."""
    torch.set_default_device(None if device.type == "cpu" else device)


STATE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (working_directory, os.chdir),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
)
"""What users' code may set for itself, of this process: how it is read and set."""
USERS: dict[int, Any] = {}  # what it has set, by its place in STATE
NO_MEMORY = ("DefaultCPUAllocator", "could not create a primitive", "CUDA error: out of memory")


def name_of(factor: Callable) -> str:
    """What messages call a factor."""
    return getattr(factor, "name", getattr(factor, "__name__", "the potential"))


def lacks_memory(error: BaseException) -> bool:
    """Whether it says so by its type or, where torch has no type for it, by torch's own words."""
    is_torch = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return is_torch or isinstance(error, (MemoryError, torch.OutOfMemoryError))


@contextlib.contextmanager
def users_state() -> Iterator[None]:
    """What users' code sets is kept for its next call; behind each call our state is back."""

    def restore(values: Sequence[Any]) -> None:
        for (read, write), value in zip(STATE, values, strict=True):
            if read() != value:
                write(value)

    ours = [read() for read, _ in STATE]
    before = [USERS.get(n, value) for n, value in enumerate(ours)]
    restore(before)
    try:
        with (
            torch.set_grad_enabled(torch.is_grad_enabled()),
            contextlib.redirect_stdout(sys.stderr),  # standard output is for results
            contextlib.redirect_stderr(sys.stderr),
        ):
            yield
    finally:
        values = enumerate(read() for read, _ in STATE)
        USERS.update((n, value) for n, value in values if value != before[n])
        restore(ours)


def call_users(name: str, function: Callable, *arguments: Any) -> Any:
    """function(*arguments); whatever a user's code raises becomes a ValueError with its line."""
    try:
        with users_state():
            return function(*arguments)
    except (Exception, SystemExit) as error:
        if lacks_memory(error):
            raise  # of a large network; the command knows what to ask less of
        frames = traceback.extract_tb(error.__traceback__)[1:]
        frames = [frame for frame in frames if "runpy" not in frame.filename]  # imports the file
        # The last line in the file of the function; a SyntaxError tells its line itself.
        lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
        place = f"line {lines[-1]}: " if lines else ""
        reason = f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")[:300]
        fault = f"{name} failed ({place}{reason})"
        remedy = "give a function that returns N numbers below inf"
        if isinstance(error, ImportError):
            remedy = "install what it imports"
        raise ValueError(f"{fault}; {remedy}") from error


def as_log_phi(values: Any, texts: Sequence[Any], name: str = "the potential") -> Tensor:
    """log phi [N] float64 on the CPU of what a factor has returned for N texts.

    ValueError for another shape, for truth values, which are no logarithms, for complex numbers,
    and for NaN and +inf, with the text at fault.
    """
    listed = values.tolist() if hasattr(values, "tolist") else values  # of a tensor or an array
    if not isinstance(listed, (list, tuple)) or len(listed) != len(texts):
        fault = f"{name} returned {type(values).__name__} for {len(texts)} texts"
        raise ValueError(f"{fault}; return one number for each text")
    log_phi = []
    for value, text in zip(listed, texts, strict=True):
        number = value.tolist() if hasattr(value, "tolist") else value
        fault = f"{name} is {number!r} for {str(text)[-80:]!r}"
        if isinstance(number, bool):  # each is looked at: true beside numbers would count as 1
            raise ValueError(f"{fault}; return 0 for true and -inf for false")
        try:
            log_phi.append(float(number) if isinstance(number, numbers.Real) else math.nan)
        except OverflowError:  # of whole numbers beyond the range of float64
            log_phi.append(-math.inf if str(number).startswith("-") else math.inf)
        if not log_phi[-1] < math.inf:
            raise ValueError(f"{fault}; return one number below infinity for each text")
    return torch.tensor(log_phi, dtype=torch.float64)


def each_once(
    function: Callable[[list], Any], texts: Sequence[Any], name: str = "the potential"
) -> Tensor:
    """function(texts) [N] float64, called with the distinct texts only."""
    place = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    values = as_log_phi(call_users(name, function, list(place)), list(place), name)
    return values[torch.tensor([place[text] for text in texts], dtype=torch.long)]


def check_equal(
    first: Tensor, again: Tensor, texts: Sequence[str], factor: Any, rounding: float = ROUNDING
) -> None:
    """ValueError where log phi [N] of the same texts differs by more than rounding does."""
    scale = first.where(first > -torch.inf, 0.0).abs().amax().clamp(min=1.0)
    differs = (first != again) & ~((first - again).abs() <= rounding * scale)  # [N]
    if differs.any():
        n = int(differs.nonzero()[0])
        numbers_of = f"is {first[n].item():.4g} in one call, {again[n].item():.4g} in another"
        fault = f"{name_of(factor)}: the number of {texts[n][-80:]!r} {numbers_of}"
        raise ValueError(f"{fault}; it must depend on its text alone")
