"""Reading and writing checkpoints in the Hugging Face directory layout, without executing anything in them.

    config.json          the shape of the network
    model.safetensors    its tensors, float32, float16 or bfloat16
    tokenizer.json       its tokenizer

Every file is written whole or not at all: first under a temporary name beside its place, then renamed.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tinystories.errors import InputError

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that takes its place if the block succeeds; InputError if it cannot be."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        yield Path(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written ({error}); free space or choose another directory") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value) -> None:
    """Write indented JSON whole or not at all; NaN is refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """Read a JSON object; InputError names the file that is absent or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the name of its directory") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); restore the file") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no JSON object; restore the file")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file by name; InputError names the file that is absent, truncated or altered."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the name of its directory") from None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); restore the file") from error


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file whole or not at all."""
    with replacing(path) as temporary:
        save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, temporary, {"format": "pt"})


def read_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizers` tokenizer, free of any padding or truncation the file asks for."""
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; check the name of its directory")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise InputError(f"{path}: not a tokenizer ({error}); restore the file") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def fill(module: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy tensors into the module in float32; InputError lists what is missing, left over, misshapen or not finite."""
    wanted = module.state_dict()
    missing = sorted(wanted.keys() - tensors.keys())
    left_over = sorted(tensors.keys() - wanted.keys())
    if missing or left_over:
        parts = [
            f"{word}: {', '.join(names)}" for word, names in (("missing", missing), ("left over", left_over)) if names
        ]
        raise InputError(
            f"{source}: the tensors do not fit config.json ({'; '.join(parts)}); use files of one checkpoint"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)} where config.json implies {list(wanted[name].shape)}"
            raise InputError(f"{source}: {name} has shape {shapes}; use files of one checkpoint")
        if not torch.isfinite(tensor).all():
            raise InputError(f"{source}: {name} holds NaN or infinite values; restore the file")
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def fingerprint(directory: Path) -> str:
    """sha256 (hex) over the three files of a checkpoint: changes whenever its outputs could."""
    digest = hashlib.sha256()
    for name in FILES:
        path = Path(directory) / name
        if not path.is_file():
            raise InputError(f"{path}: no such file; check the name of its directory")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
