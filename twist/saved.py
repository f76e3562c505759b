"""Trained pairs (p^(m), psi^(m)) on disk: a directory for each generation m.

    twist.safetensors       psi^(m)
    adapter.safetensors     p^(m) where it is an adapter of p^(0)
    model.safetensors, ...  p^(m) where it is p^(0) or fine-tuned: a checkpoint with its tokenizer

The metadata of the first two name the class, a key of TWISTS. An architecture of the twist is a
module with forward(hidden [.., D]) -> log psi [.., V] and a class method like(tensors, network),
which makes a twist with the sizes of saved tensors, over p^(0) = network. It needs a file, a line
in TWISTS and its use in main.py. A twist whose states end with z keeps the scores in `memory`; one
that brings its own proposal keeps it in `adapter`, from which the pool is then drawn.
"""

from pathlib import Path

import torch
from torch import nn

import tinystories
from tinystories.checkpoint import fill, read_metadata, read_tensors, reading, write_tensors
from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo
from tinystories.tokenizer import Tokenizer
from twist.adapter import Adapter
from twist.mlp import TwistMLP
from twist.value import ValueTwist

FILE = "twist.safetensors"
ADAPTER = "adapter.safetensors"
TWISTS = {"mlp": TwistMLP, "value": ValueTwist, "adapter": Adapter}


def write(path: Path, module: nn.Module) -> None:
    """Write a module of one of the classes of TWISTS."""
    kind = next(name for name in TWISTS if TWISTS[name] is type(module))
    tensors = {name: value.clone() for name, value in module.state_dict().items()}  # may be shared
    write_tensors(path, tensors, kind=kind)


def read(path: Path, base: GPTNeo) -> nn.Module:
    """The module of a file over p^(0) = base, frozen; InputError names a tensor that misfits."""
    tensors, metadata = read_tensors(path), read_metadata(path)
    remedy = "restore the run's own file, or make the run again"
    with reading(path, "not of this version and this model", remedy):
        module = TWISTS[metadata["kind"]].like(tensors, base)
        fill(module, tensors)
        return module.requires_grad_(False)


def save_pair(directory: Path, p: GPTNeo | Adapter, tokenizer: Tokenizer, psi: nn.Module) -> None:
    """Write p^(m), then psi^(m): a directory that has a twist is complete."""
    if isinstance(p, Adapter):
        write(directory / ADAPTER, p)
    else:
        tinystories.save(directory, p, tokenizer)
    write(directory / FILE, psi)


def load_pair(directory: Path, m: int, base: GPTNeo) -> tuple[nn.Module, nn.Module]:
    """(p^(m), psi^(m)) over p^(0) = base; InputError names a file that is damaged or misfits."""
    psi = read(directory / FILE, base)
    if m == 0:
        return base, psi
    path = directory / ADAPTER
    if not path.exists():
        return tinystories.load(directory)[0].to(base.wte.weight), psi
    p = read(path, base)
    needed = p.memory if isinstance(p, Adapter) else None
    given = getattr(psi, "memory", None)
    is_same = needed is given if needed is None or given is None else torch.equal(needed, given)
    if not is_same:
        raise InputError(f"{path}: does not fit {FILE}; restore the run's own files")
    return p, psi
