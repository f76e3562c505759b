"""A trained pair (p^(m), psi^(m)), and its files in a directory.

    twist.safetensors      psi^(m); its metadata say whether p^(m) is p^(0) or fine-tuned, and name
                           the form of psi^(m) (`twist/mlp.py`), or psi = 1
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

import torch
from torch import nn

from tinystories.checkpoint import fill, read_metadata, read_tensors, reading, write_tensors
from tinystories.errors import InputError
from tsmc.interfaces import BaseModel
from twist.adapter import Adapted, Adapter
from twist.mlp import FORMS, make_twist

TWIST, MODEL, ADAPTER = "twist.safetensors", "model.safetensors", "adapter.safetensors"
PSI_IS_ONE = "one"  # in place of a form
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
    # A directory holds one pair: that of the other kind goes.
    other = TWIST if isinstance(pair.model, Adapted) else ADAPTER
    (directory / other).unlink(missing_ok=True)
    if isinstance(pair.model, Adapted):
        write_module(directory / ADAPTER, pair.model.adapter)
        return
    is_base = pair.model is base
    if not is_base:
        write(directory, pair.model.network)
    twist, form = nn.Module(), PSI_IS_ONE
    if pair.twist is not None:
        twist = pair.twist
        form = {kind: name for name, kind in FORMS.items()}[type(twist)]
    # In one entry: the order of several would differ from process to process.
    write_module(directory / TWIST, twist, over=f"{'p^(0)' if is_base else MODEL} {form}")


def load_pair(
    directory: str | Path,
    base: BaseModel,
    read: Callable[[Path, BaseModel], nn.Module] = read_network,
) -> Pair:
    """The pair over p^(0) = base; InputError names a file that is missing, damaged or misfits."""
    directory = Path(directory)
    embeddings = base.output_embeddings
    source = torch.Generator(embeddings.device)  # of first values, which are replaced
    if (directory / ADAPTER).exists():
        tensors = read_tensors(directory / ADAPTER)
        with reading(directory / ADAPTER, "not of this version and this model", REMEDY):
            adapter = Adapter(embeddings, tensors.get("scores"), source)
            fill(adapter, tensors)
        adapter = adapter.requires_grad_(False).to(embeddings.device)
        return Pair(Adapted(base, adapter), None)
    path = directory / TWIST
    if not path.exists():
        raise InputError(f"{directory}: holds no {TWIST} or {ADAPTER}; name a saved generation")
    over, _, form = read_metadata(path).get("over", "").partition(" ")
    model = base.with_network(read(directory, base)) if over == MODEL else base
    if form == PSI_IS_ONE:
        return Pair(model, None)
    tensors = read_tensors(path)
    with reading(path, "not of this version and this model", REMEDY):
        twist = make_twist(form, model, source)
        fill(twist, tensors)
    return Pair(model, twist.requires_grad_(False).to(embeddings.device))
