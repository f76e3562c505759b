"""A twist on disk: `twist.safetensors` beside the language model it was learned for, its sizes read off the tensors."""

from pathlib import Path

import torch

from tinystories.checkpoint import fill, read_tensors, write_tensors
from tinystories.errors import InputError
from twist.mlp import TwistMLP

FILE = "twist.safetensors"


def save_twist(directory: str | Path, twist: TwistMLP) -> None:
    """Write the twist's tensors, whole or not at all."""
    write_tensors(Path(directory) / FILE, twist.state_dict())


def load_twist(directory: str | Path, device: str | torch.device = "cpu") -> TwistMLP:
    """The twist of a generation's directory; InputError names the file and the tensor that does not fit."""
    path = Path(directory) / FILE
    tensors = read_tensors(path)
    try:
        hidden_units, width = tensors["first.weight"].shape
        vocab_size = len(tensors["last.bias"])
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not a twist ({error!r}); name a directory that main.py wrote") from error
    twist = TwistMLP(width, hidden_units, vocab_size, torch.Generator())
    fill(twist, tensors, path)
    return twist.to(device)
