"""Reading and writing the files of a checkpoint in the Hugging Face directory layout.

    config.json          the shape of the network
    model.safetensors    its tensors, or pytorch_model.bin
    tokenizer.json       its tokenizer

Nothing in a checkpoint is executed.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from tinystories.errors import InputError, listed, reason_of

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZER = "tokenizer.json"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds; InputError if not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        fault = f"cannot be written ({error}); free space or choose another directory"
        raise InputError(f"{path}: {fault}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value) -> None:
    """Write indented JSON; ValueError for NaN."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file. The order of several metadata differs from process to process."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, metadata or {"format": "pt"}))


@contextlib.contextmanager
def reading(path: Path | str, trouble: str, remedy: str = "restore the file") -> Iterator[None]:
    """Turn whatever the block raises into an InputError: the file, its trouble, the remedy."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        fault = f"{trouble} ({reason_of(error)})"
        if isinstance(path, Path) and not path.exists():
            fault = "no such file"
        raise InputError(f"{path}: {fault}; {remedy}") from error


def read_json(path: Path) -> dict:
    """Read a JSON object."""
    with reading(path, "cannot be read as JSON"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("it does not hold a JSON object")
        return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file or of a pytorch_model.bin by name."""
    with reading(path, "its tensors cannot be read"):
        if path.suffix == ".bin":
            return torch.load(path, map_location="cpu", weights_only=True)
        return load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with reading(path, "its metadata cannot be read"), safe_open(path, "pt") as file:
        return file.metadata() or {}


def digest_of(path: Path) -> str:
    """sha256 of a file in hex."""
    with reading(path, "cannot be read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_file(directory: Path) -> Path:
    """The file that holds the weights; if there is none, the missing one."""
    safetensors, pickled = (directory / name for name in WEIGHTS)
    return pickled if pickled.exists() and not safetensors.exists() else safetensors


def fingerprint(directory: Path) -> str:
    """sha256 (hex) over configuration, weights and tokenizer: all that the outputs depend on."""
    files = (directory / CONFIG, weight_file(directory), directory / TOKENIZER)
    return hashlib.sha256(b"".join(bytes.fromhex(digest_of(path)) for path in files)).hexdigest()


def fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a module the tensors in float32; ValueError if they do not fit or are not finite."""
    wanted = module.state_dict()
    if wanted.keys() != tensors.keys():
        missing = listed(wanted.keys() - tensors.keys())
        raise ValueError(f"missing: {missing}; left over: {listed(tensors.keys() - wanted.keys())}")
    values = {}
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shape = list(wanted[name].shape)
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {shape}")
        values[name] = tensor.to(torch.float32, copy=True).contiguous()
        if not values[name].isfinite().all():
            raise ValueError(f"{name} holds NaN, or values infinite in float32")
    module.load_state_dict(values, assign=True)
