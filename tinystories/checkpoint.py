"""Reading and writing the files of a checkpoint in the Hugging Face directory layout.

    config.json              the shape of the network
    model.safetensors        its tensors; or pytorch_model.bin; or an index and the shards it names
    tokenizer.json           its tokenizer; or vocab.json and merges.txt
    1_Pooling/config.json    how a sentence encoder makes one vector of a text

Nothing in a checkpoint is executed.
"""

import contextlib
import hashlib
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from tinystories.errors import InputError, listed, reason_of

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # behind such a name: says which shards hold the weights
TOKENIZER = "tokenizer.json"
TOKENIZER_OPTIONS = "tokenizer_config.json"
OLDER_TOKENIZER = ("vocab.json", "merges.txt")
POOLING = "1_Pooling/config.json"
LFS_POINTER = b"version https://git-lfs"  # how a file begins that Git LFS has not yet fetched


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
def reading(path: Path, trouble: str, remedy: str = "restore the file") -> Iterator[None]:
    """Turn whatever the block raises into an InputError: the file, its trouble, the remedy."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        fault = f"{trouble} ({reason_of(error)})"
        if not path.exists():
            fault = "no such file"
        elif path.is_file() and path.read_bytes().startswith(LFS_POINTER):
            fault, remedy = "is a Git-LFS pointer", "run git lfs pull"
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
        if path.suffix != ".bin":
            return load_file(path)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError):  # whose text advises to load it unsafely
            raise ValueError("it is no file of PyTorch, or holds more than tensors") from None


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with reading(path, "its metadata cannot be read"), safe_open(path, "pt") as file:
        return file.metadata() or {}


def digest_of(path: Path) -> str:
    """sha256 of a file in hex."""
    with reading(path, "cannot be read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The file that holds the weights, or the shards of an index; if none, the missing one."""
    for name in WEIGHTS:
        index = directory / f"{name}{INDEX}"
        if (directory / name).exists():
            return [directory / name]
        if index.exists():
            with reading(index, "names no shards"):
                shards = set(read_json(index)["weight_map"].values())
                return [directory / shard for shard in sorted(shards)]
    return [directory / WEIGHTS[0]]


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that define the tokenizer; older ones leave something to its options."""
    older = [directory / name for name in OLDER_TOKENIZER]
    options = directory / TOKENIZER_OPTIONS
    if (directory / TOKENIZER).exists() or not older[0].exists():
        return [directory / TOKENIZER]
    return [*older, options] if options.exists() else older


def fingerprint(directory: Path) -> str:
    """sha256 (hex) over configuration, weights and tokenizer: all that the outputs depend on."""
    files = [directory / CONFIG, *weight_files(directory), *tokenizer_files(directory)]
    files += [directory / POOLING] if (directory / POOLING).exists() else []
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
