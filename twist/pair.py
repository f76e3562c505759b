"""A trained pair (p^(m), psi^(m)), and its files in a directory.

    twist.safetensors      psi^(m), an MLP; its metadata say whether p^(m) is p^(0) or fine-tuned
    model.safetensors      p^(m) where it is fine-tuned; beside it what the writer adds
    adapter.safetensors    where the pair is q, p^(0) with an adapter, and psi = 1

A twist psi = q / p of p may be kept as q itself with psi = 1: then sigma is proportional to q times
p phi / q (eq. 8), and nothing else changes. The file that makes a directory whole is written last.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tinystories.checkpoint import fill, read_metadata, read_tensors, reading, write_tensors
from tinystories.errors import InputError
from tsmc.interfaces import BaseModel
from twist.adapter import Adapted, Adapter
from twist.mlp import TwistMLP

TWIST, MODEL, ADAPTER = "twist.safetensors", "model.safetensors", "adapter.safetensors"
REMEDY = "restore the run's own file, or make the run again"


@dataclass(frozen=True)
class Pair:
    """What twisted SMC runs with: a language model and its twist."""

    model: Any  # p^(m): a BaseModel, or an Adapted
    twist: Any  # psi^(m): a module, or None for psi = 1


def write_module(path: Path, module: nn.Module, **metadata: str) -> None:
    """Write the tensors of a module, copied because some may share their memory."""
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    write_tensors(path, tensors, **metadata)


def read_module(path: Path, kind: type[TwistMLP] | type[Adapter], base: BaseModel) -> Any:
    """The module of a file over p^(0) = base, frozen; InputError names a tensor that misfits."""
    tensors = read_tensors(path)
    with reading(path, "not of this version and this model", REMEDY):
        module = kind.like(tensors, base)
        fill(module, tensors)
        return module.requires_grad_(False).to(base.output_embeddings.device)


def write_network(directory: Path, network: nn.Module) -> None:
    """Write the tensors of any network."""
    write_module(directory / MODEL, network)


def read_network(directory: Path, base: BaseModel) -> nn.Module:
    """A network of the kind of p^(0) = base with the tensors of a file."""
    tensors = read_tensors(directory / MODEL)
    network = copy.deepcopy(base.network)
    with reading(directory / MODEL, "does not fit the model", REMEDY):
        network.load_state_dict(tensors)
        if not all(parameter.isfinite().all() for parameter in network.parameters()):
            raise ValueError("it holds NaN or infinite numbers")
    return network


def save_pair(
    directory: str | Path,
    pair: Pair,
    base: BaseModel,
    write: Callable[[Path, nn.Module], None] = write_network,
) -> None:
    """Write a pair over p^(0) = base; write(directory, network) writes a fine-tuned p^(m)."""
    directory = Path(directory)
    # A directory holds one pair: that of the other learner goes.
    other = TWIST if isinstance(pair.model, Adapted) else ADAPTER
    (directory / other).unlink(missing_ok=True)
    if isinstance(pair.model, Adapted):
        write_module(directory / ADAPTER, pair.model.adapter)
        return
    is_base = pair.model is base
    if not is_base:
        write(directory, pair.model.network)
    write_module(directory / TWIST, pair.twist, over="p^(0)" if is_base else MODEL)


def load_pair(
    directory: str | Path,
    base: BaseModel,
    read: Callable[[Path, BaseModel], nn.Module] = read_network,
) -> Pair:
    """The pair over p^(0) = base; InputError names a file that is missing, damaged or misfits."""
    directory = Path(directory)
    if (directory / ADAPTER).exists():
        return Pair(Adapted(base, read_module(directory / ADAPTER, Adapter, base)), None)
    if not (directory / TWIST).exists():
        raise InputError(f"{directory}: holds no {TWIST} or {ADAPTER}; name a saved generation")
    twist = read_module(directory / TWIST, TwistMLP, base)
    if read_metadata(directory / TWIST).get("over") != MODEL:
        return Pair(base, twist)
    return Pair(base.with_network(read(directory, base)), twist)
