"""The pairs (p^(m), psi^(m)) of a run on disk: a directory for each generation, the twist in `twist.safetensors` beside p^(m).

The twist is the last file that is written, so a directory that has one is whole.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

import tinystories
from eval.run.setup import Setup
from tinystories.checkpoint import fill, read_tensors, reading, write_tensors
from tinystories.errors import InputError
from tinystories.fast import accelerate
from tinystories.gpt_neo import GPTNeo
from tsmc.interfaces import Twist
from tsmc.sampler import Sigma
from twist import EmbeddingTwist, TwistMLP

FILE = "twist.safetensors"


def save_generation(directory: Path, model: GPTNeo, tokenizer: Tokenizer, twist: nn.Module) -> None:
    """Write p^(m), its tokenizer and psi^(m)."""
    tinystories.save(directory, model, tokenizer)
    save_twist(directory, twist)


def save_twist(directory: Path, twist: nn.Module) -> None:
    """Write the twist's tensors, whole or not at all."""
    write_tensors(Path(directory) / FILE, twist.state_dict())


def load_twist(directory: Path, device: str | torch.device = "cpu") -> TwistMLP | EmbeddingTwist:
    """The twist of a generation's directory; InputError names the file and the tensor that does not fit."""
    path = Path(directory) / FILE
    tensors = read_tensors(path)
    with reading(path, "not a twist", "name a directory that main.py wrote"):
        embeddings = tensors.get("products.weight")
        inner = "" if embeddings is None else "shift."
        hidden_units, width = tensors[inner + "first.weight"].shape
        shape = tensors[inner + "second.weight"].shape
        if shape != (hidden_units, hidden_units):  # refused before there is memory for it
            raise ValueError(f"second.weight has shape {list(shape)} beside {hidden_units} hidden units")
        if embeddings is None:
            twist = TwistMLP(width, hidden_units, len(tensors["last.bias"]), torch.Generator())
        else:
            twist = EmbeddingTwist(hidden_units, embeddings, torch.Generator())
    fill(twist, tensors, path)
    return accelerate(twist.to(device))


def generations(run: Path) -> dict[int, Path]:
    """Directory of every generation that is saved whole; InputError where there is none."""
    numbered = (path for path in run.glob("generation-*") if path.name[11:].isdecimal() and (path / FILE).is_file())
    directories = {int(path.name[11:]): path for path in numbered}
    if not directories:
        raise InputError(f"{run}: holds no saved generation; name a run of main.py that has finished one")
    return dict(sorted(directories.items()))


def chosen_generation(run: Path, number: int | None, name: str) -> tuple[int, Path]:
    """Number and directory of a generation, the last if none is named; InputError says `name` where the run has it not."""
    saved = generations(run)
    m = max(saved) if number is None else number
    if m not in saved:
        raise InputError(f"{name} {m} is not in {run}; it holds {', '.join(map(str, saved))}")
    return m, saved[m]


def load_generation(setup: Setup, directory: Path, m: int, device: torch.device) -> tuple[list[Sigma], Twist]:
    """Sigma after each prompt, through phi itself at m = 0, and the twist; the model in the type of p^(0) as it was loaded.

    InputError names the file that does not fit.
    """
    twist, model = load_twist(directory, device), None
    if m > 0:
        model = accelerate(tinystories.load(directory, device)[0].to(setup.model.wte.weight.dtype))
    sizes = (model or setup.model).config
    if (twist.width, twist.vocab_size) != (sizes.hidden_size, sizes.vocab_size):
        raise InputError(f"{directory / FILE}: belongs to another language model; restore the run's own")
    return setup.sigmas(model), twist
