"""Reading and writing checkpoints in the Hugging Face directory layout, without executing anything in them.

    config.json          the shape of the network
    model.safetensors    its tensors, float32, float16 or bfloat16; or several files and model.safetensors.index.json
    tokenizer.json       its tokenizer; or vocab.json and merges.txt, or vocab.txt

This is what is written, and what is read first. A directory without safetensors may hold pytorch_model.bin (or several
files and an index): that is a pickle, of which only the tensors are read. Every file is written whole or not at all:
first under a temporary name beside its place, then renamed.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinystories.errors import InputError, listed, shortened

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHARD = re.compile(r"\w[\w.-]{0,200}", re.ASCII)
TOKENIZER_OPTIONS = "tokenizer_config.json"


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


@contextlib.contextmanager
def reading(
    path: Path, trouble: str, remedy: str = "restore the file", absent: str = "check the name of its directory"
) -> Iterator[None]:
    """Whatever goes wrong in the block becomes an InputError that names the file, its `trouble`, the reason and `remedy`.

    `absent` is the remedy where there is no file. Anything but a file in its place is refused too: to open a pipe could
    wait without end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is no regular file")
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {absent}") from None
    except (InputError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # libraries raise anything, and a panic of one in Rust is no Exception
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0])
        raise InputError(f"{path}: {trouble} ({reason}); {remedy}") from error


def read_json(path: Path) -> dict:
    """Read a JSON object; InputError names the file that is absent or broken."""
    with reading(path, "cannot be read as JSON"):
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no JSON object; restore the file")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file by name; InputError names the file that is absent, truncated or altered."""
    with reading(path, "not a whole safetensors file"):
        return load_file(path)


def read_pickled(path: Path) -> dict[str, Tensor]:
    """All tensors of a `pytorch_model.bin` by name, by an unpickler that knows tensors and runs nothing else."""
    trouble, remedy = (
        "damaged, or holds more than tensors, which is never run",
        "restore the file or use model.safetensors",
    )
    with reading(path, trouble, remedy):
        size = os.path.getsize(path)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > size:
                    raise ValueError("it is compressed, which torch.save never does")
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(map(is_plain, tensors, tensors.values())):
        raise InputError(f"{path}: holds no tensors by name; use the state dict of one network")
    if sum(tensor.nbytes for tensor in tensors.values()) > 2 * size:  # tied tensors may share their numbers
        raise InputError(f"{path}: is smaller than the tensors that it names; {remedy}")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def is_plain(name: object, tensor: object) -> bool:
    """Whether a pickle's entry is a tensor by its name whose numbers are there, one by one."""
    if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def read_shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each file of an index, files in alphabetical order."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise InputError(f"{index}: holds no weight_map; restore the file")
    files = sorted(set(places.values()))
    if odd := [file for file in files if not SHARD.fullmatch(file)]:
        raise InputError(f"{index}: {listed(odd)} is no name of a file beside it; restore the file")
    return {file: {name for name, place in places.items() if place == file} for file in files}


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights: one, or an index and then its files. Where there are none, what is missing."""
    present = [name for name in WEIGHTS if (Path(directory) / name).is_file()]
    first = Path(directory) / (present or WEIGHTS)[0]
    if not first.name.endswith(".index.json"):
        return [first]
    return [first, *(first.with_name(file) for file in read_shards(first))]


def read_weights(directory: Path) -> tuple[dict[str, Tensor], Path]:
    """All weights of a directory by name, and the file to name in errors about them.

    InputError where a file is absent or broken, or where an index disagrees with the files that it names.
    """
    first, *parts = weight_files(directory)
    read = read_pickled if first.name.startswith("pytorch_model.bin") else read_tensors
    if not parts:
        return read(first), first
    tensors, names = {}, read_shards(first)
    for part in parts:
        loaded = read(part)
        if wrong := loaded.keys() ^ names[part.name]:
            raise InputError(f"{part}: {first.name} disagrees about {listed(wrong)}; use files of one checkpoint")
        tensors |= loaded
    return tensors, first


def without_prefix(tensors: dict[str, Tensor], prefix: str, source: Path) -> dict[str, Tensor]:
    """The tensors by their names less `prefix`, which each may carry or not; InputError where one name does both."""
    if twice := [name for name in tensors if prefix + name in tensors]:
        raise InputError(f"{source}: {listed(twice)} stands with and without {prefix}; use files of one checkpoint")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file whole or not at all."""
    with replacing(path) as temporary:
        save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, temporary, {"format": "pt"})


def read_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizers` tokenizer, free of any padding or truncation the file asks for."""
    with reading(path, "not a tokenizer"):
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that make the tokenizer. Where there are none, what is missing."""
    directory = Path(directory)
    present = [names for names in TOKENIZERS if all((directory / name).is_file() for name in names)]
    names = (present or TOKENIZERS)[0]
    if names != TOKENIZERS[0] and (directory / TOKENIZER_OPTIONS).is_file():
        names = (*names, TOKENIZER_OPTIONS)
    return [directory / name for name in names]


class _NoDraws(TorchFunctionMode):
    """Leaves out the drawing of initial values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """The tensor as it is, where it would be filled with normal numbers."""
        if function is nn.init.normal_:
            return (*args, *(kwargs or {}).values())[0]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Networks made inside have shapes and no values, until a checkpoint fills them.

    On the meta device alone an embedding would still draw, for which PyTorch loads its compiler: more than a second.
    """
    with torch.device("meta"), _NoDraws():
        yield


def fill(module: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy tensors into the module in float32; InputError lists what is missing, left over, misshapen or not finite.

    A module on the device "meta" asks for no memory before its shapes have been compared with what there is.
    """
    wanted = module.state_dict()
    differences = {"missing": wanted.keys() - tensors.keys(), "left over": tensors.keys() - wanted.keys()}
    if faults := [f"{word}: {listed(names)}" for word, names in differences.items() if names]:
        fault = f"the tensors do not fit config.json ({'; '.join(faults)})"
        raise InputError(f"{source}: {fault}; use files of one checkpoint")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)} where config.json implies {list(wanted[name].shape)}"
            raise InputError(f"{source}: {name} has shape {shapes}; use files of one checkpoint")
        if tensor.dtype not in TYPES:
            raise InputError(f"{source}: {name} is of {tensor.dtype}; use a checkpoint in float32, float16 or bfloat16")
        if not torch.isfinite(tensor).all():
            raise InputError(f"{source}: {name} holds NaN or infinite values; restore the file")
    layout = {"dtype": torch.float32, "copy": True, "memory_format": torch.contiguous_format}
    module.load_state_dict({name: tensor.to(**layout) for name, tensor in tensors.items()}, assign=True)


def fingerprint(directory: Path) -> str:
    """sha256 (hex) over the configuration, the weights and the tokenizer: changes whenever the outputs could."""
    directory, digest = Path(directory), hashlib.sha256()
    for path in (directory / "config.json", *weight_files(directory), *tokenizer_files(directory)):
        if not path.is_file():
            raise InputError(f"{path}: no such file; check the name of its directory")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
