"""Reading and writing files: a file is replaced as a whole, and every fault names its file.

Tensors are kept as safetensors; a pytorch_model.bin is read too, without executing what is in it.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

POINTER = b"version https://git-lfs"  # what a clone without git-lfs has in place of large files


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds; ValueError if not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would become a file
            raise OSError("it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        fault = f"cannot be written ({error}); free space or choose another directory"
        raise ValueError(f"{path}: {fault}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON; ValueError for NaN."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file. The order of several metadata differs from process to process."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, metadata or {"format": "pt"}))


@contextlib.contextmanager
def reading(path: Path, trouble: str, remedy: str = "restore the file") -> Iterator[None]:
    """Turn whatever the block raises into a ValueError: the file, its trouble, the remedy.

    Where a file, or one in the directory `path`, is a pointer of git-lfs, the ValueError says that.
    """
    try:
        yield
    except Exception as error:  # the libraries that read files have no common base class
        for file in path.iterdir() if path.is_dir() else [path]:
            if file.is_file() and file.open("rb").read(len(POINTER)) == POINTER:
                fault = "is a pointer of git-lfs, not the file; run `git lfs pull`"
                raise ValueError(f"{file}: {fault}") from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        fault = f"{trouble} ({reason})" if path.exists() else "no such file"
        raise ValueError(f"{path}: {fault}; {remedy}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError where there is none."""
    with reading(path, "cannot be read as JSON"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("it does not hold a JSON object")
        return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file or of a pytorch_model.bin by name, or of several by their
    index."""
    with reading(path, "its tensors cannot be read"):
        if path.suffix == ".json":
            names = sorted(set(read_json(path)["weight_map"].values()))
            return {k: x for name in names for k, x in read_tensors(path.with_name(name)).items()}
        if path.suffix == ".bin":
            return torch.load(path, map_location="cpu", weights_only=True)
        return load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    with reading(path, "its metadata cannot be read"), safe_open(path, "pt") as file:
        return file.metadata() or {}
