"""Reading and writing checkpoints in the Hugging Face directory layout.

    config.json          the shape of the network
    model.safetensors    its tensors; or several files and model.safetensors.index.json
    tokenizer.json       its tokenizer; or vocab.json and merges.txt, or vocab.txt

These files are written, and preferred when reading. Without safetensors, pytorch_model.bin is read,
or several such files and their index. Nothing in a checkpoint is executed.

Whatever reads a file does it inside `reading`, which turns every exception into one InputError.
Whatever writes a file does it inside `replacing`: the file is complete or it is not there.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tinystories.errors import InputError, listed

WEIGHTS = ["model.safetensors", "model.safetensors.index.json"]
WEIGHTS += ["pytorch_model.bin", "pytorch_model.bin.index.json"]
TOKENIZERS = [["tokenizer.json"], ["vocab.json", "merges.txt"], ["vocab.txt"]]
TOKENIZER_OPTIONS = "tokenizer_config.json"
MOST, MOST_LAYERS = 10**7, 1000  # of the sizes in a config.json
PARTIAL = ".tsmc-partial"  # suffix of what an interrupted program leaves behind


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds; InputError if not."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # the content reaches the disk before the name points to it
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


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        temporary.write_bytes(save(tensors, {"format": "pt"}))


@contextlib.contextmanager
def reading(path: Path, trouble: str, remedy: str = "restore the file") -> Iterator[None]:
    """Turn whatever the block raises into an InputError: the file, its trouble, the remedy."""
    try:
        yield
    except (InputError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the name of its directory") from None
    except BaseException as error:  # a panic of a library in Rust is not an Exception
        reason = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        raise InputError(f"{path}: {trouble} ({reason}); {remedy}") from error


def read_json(path: Path) -> dict:
    """Read a JSON object."""
    with reading(path, "cannot be read as JSON"):
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("it does not hold a JSON object")
        return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file or of a pytorch_model.bin by name."""
    with reading(path, "its tensors cannot be read"):
        if Path(path).suffix != ".bin":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        return {str(name): tensor.detach() for name, tensor in tensors.items()}


def digest_of(path: Path) -> str:
    """sha256 of a file in hex."""
    with reading(path, "cannot be read"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def network_sizes(raw: dict, names: list[str], heads: str, epsilon: str) -> dict[str, int]:
    """The sizes `names` in a config.json; ValueError for a network that cannot be built.

    Layers are bounded most, for a network is built layer by layer before its weights are read.
    """
    for name in names:
        most = MOST_LAYERS if name.endswith("layers") else MOST
        if type(raw[name]) is not int or not 0 < raw[name] <= most:
            raise ValueError(f"{name} is {raw[name]!r}, not an integer from 1 to {most}")
    if raw["hidden_size"] % raw[heads]:
        raise ValueError(f"hidden_size must be a multiple of {heads}")
    if not 0 < float(raw[epsilon]) < 1:
        raise ValueError(f"{epsilon} must be between 0 and 1")
    return {name: raw[name] for name in names}


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights: one, or an index and its files; if none, the missing one."""
    paths = [Path(directory) / name for name in WEIGHTS]
    first = next((path for path in paths if path.exists()), paths[0])
    if first.suffix != ".json":
        return [first]
    with reading(first, "not an index of weights"):
        files = sorted(set(read_json(first)["weight_map"].values()))
        if not files or any(Path(file).name != file for file in files):
            raise ValueError("it must name files in its own directory")
        return [first, *(first.with_name(file) for file in files)]


def read_weights(directory: Path) -> tuple[dict[str, Tensor], Path]:
    """All weights of a directory by name, and the file to name in errors about them."""
    first, *shards = weight_files(directory)
    tensors = {}
    for path in shards or [first]:
        tensors |= read_tensors(path)
    return tensors, first


def tokenizer_files(directory: Path) -> list[Path]:
    """The files that define the tokenizer; if none, the missing one."""
    complete = [names for names in TOKENIZERS if all((Path(directory) / n).exists() for n in names)]
    names = complete[0] if complete else TOKENIZERS[0]
    if names != TOKENIZERS[0] and (Path(directory) / TOKENIZER_OPTIONS).exists():
        names = [*names, TOKENIZER_OPTIONS]
    return [Path(directory) / name for name in names]


def fingerprint(directory: Path) -> str:
    """sha256 (hex) over configuration, weights and tokenizer: all that the outputs depend on."""
    files = [Path(directory) / "config.json", *weight_files(directory), *tokenizer_files(directory)]
    return hashlib.sha256(b"".join(bytes.fromhex(digest_of(path)) for path in files)).hexdigest()


class NoDraws(TorchFunctionMode):
    """Omits random initial values: even without memory, drawing them loads PyTorch's compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call the function, unless it draws."""
        return None if function is nn.init.normal_ else function(*args, **(kwargs or {}))


def empty_network(directory: Path, kind: str, build: Callable[[dict], nn.Module]) -> nn.Module:
    """What `build` makes of a config.json: shapes without memory, until `fill` gives them values.

    `kind` names the network in the InputError for a config.json that does not fit.
    """
    path = Path(directory) / "config.json"
    raw = read_json(path)
    remedy = "restore it or use another checkpoint"
    with reading(path, f"not {kind}", remedy), torch.device("meta"), NoDraws():
        return build(raw)


def fill(module: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Give a module the tensors in float32; InputError if they do not fit or are not finite."""
    wanted = module.state_dict()
    with reading(source, "does not fit the network", "use the files of one checkpoint"):
        if wanted.keys() != tensors.keys():
            missing, extra = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
            raise ValueError(f"missing: {listed(missing)}; left over: {listed(extra)}")
        for name, tensor in tensors.items():
            if tensor.shape != wanted[name].shape:
                shapes = f"{list(tensor.shape)}, not {list(wanted[name].shape)}"
                raise ValueError(f"{name} has shape {shapes}")
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ValueError(f"{name} holds NaN, infinite values or no floats")
    XX

def save_network(
    directory: str | Path,
    config: dict,
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer,
    options: dict,
    dtype: torch.dtype,
) -> None:
    """Write a directory: weights in `dtype`, tokenizer with its `options`, configuration."""
    path = Path(directory)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    write_tensors(path / "model.safetensors", tensors)
    write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_json(path / TOKENIZER_OPTIONS, options)
    write_json(path / "config.json", config | {"torch_dtype": str(dtype).removeprefix("torch.")})
