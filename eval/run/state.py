"""What a phase needs to go on where it stopped, as one file.

    sha256 of the rest, in hex, and a newline | torch.save of tensors, numbers, strings, lists and dictionaries

Written whole or not at all. A file whose hash does not fit is refused by name, and reading executes nothing that is in it.
"""

import hashlib
import io
from pathlib import Path

import torch

from tinystories.checkpoint import reading, replacing
from tinystories.errors import InputError

DIGEST = 64  # hex digits of a sha256
State = torch.nn.Module | torch.optim.Optimizer | torch.Generator
"""What the steps of a loop change: the position of a random stream counts as much as the weights."""


def digest_of(path: Path) -> str:
    """sha256 of a file in hex; InputError where it cannot be read."""
    with reading(path, "cannot be read"):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write_state(path: Path, value: dict) -> None:
    """Write `value` with its hash."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(hashlib.sha256(buffer.getbuffer()).hexdigest().encode() + b"\n")
        file.write(buffer.getbuffer())


def read_state(path: Path, device: torch.device, remedy: str = "delete it to repeat its phase") -> dict:
    """What was written, tensors on `device`; InputError names a file that is absent or not as it was written."""
    with reading(path, "cannot be read", remedy, absent=remedy):
        content = Path(path).read_bytes()
    digest, payload = content[:DIGEST], content[DIGEST + 1 :]
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise InputError(f"{path}: is not as it was written; {remedy}")
    with reading(path, "cannot be read, it holds more than a state", remedy):
        return torch.load(io.BytesIO(payload), map_location=device, weights_only=True)


def take_state(state: dict[str, State], finished: bool) -> dict:
    """The state of every named object; an optimiser's is of no use once its loop has finished."""
    taken = {}
    for name, thing in state.items():
        if isinstance(thing, torch.Generator):
            taken[name] = thing.get_state()
        elif not (finished and isinstance(thing, torch.optim.Optimizer)):
            taken[name] = thing.state_dict()
    return taken


def give_state(state: dict[str, State], taken: dict) -> None:
    """Put every named object into the state that `take_state` took."""
    for name, value in taken.items():
        thing = state[name]
        if isinstance(thing, torch.Generator):
            thing.set_state(value.cpu())
        else:
            thing.load_state_dict(value)
