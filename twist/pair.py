"""A trained pair (p^(m), psi^(m)), and its files in a directory.

    model.safetensors    p^(m): a fine-tuned network, or an adapter of p^(0)
    twist.safetensors    psi^(m)
    pair.json            which of them there are: p^(m) may be p^(0), and psi^(m) may be 1

A twist psi = q / p of p may be kept as q itself with psi = 1: then sigma is proportional to q times
p phi / q (eq. 8), and nothing else changes. The file that makes a directory whole is written last.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tinystories.checkpoint import read_json, read_tensors, reading, write_json, write_tensors
from tinystories.errors import InputError
from tsmc.interfaces import BaseModel
from twist.adapter import Adapter, adapted
from twist.mlp import FORMS, make_twist

MODEL, TWIST, PAIR = "model.safetensors", "twist.safetensors", "pair.json"
BASE, NETWORK, ADAPTER = "p^(0)", "fine-tuned", "adapter"  # what p^(m) may be
MISFIT = "not of this version and this model"
REMEDY = "restore the run's own file, or make the run again"


@dataclass(frozen=True)
class Pair:
    """What twisted SMC runs with: a language model and its twist."""

    model: Any  # p^(m)
    twist: Any  # psi^(m): a module, or None for psi = 1


def save_pair(directory: str | Path, pair: Pair, base: BaseModel) -> None:
    """Write a pair over p^(0) = base."""
    directory = Path(directory)
    kind, form = BASE, None
    if hasattr(pair.model, "adapter"):
        kind = ADAPTER
        write_module(directory / MODEL, pair.model.adapter)
    elif pair.model is not base:
        kind = NETWORK
        write_module(directory / MODEL, pair.model.network)
    if pair.twist is not None:
        form = {form: name for name, form in FORMS.items()}[type(pair.twist)]
        write_module(directory / TWIST, pair.twist)
    write_json(directory / PAIR, {"model": kind, "twist": form})


def load_pair(directory: str | Path, base: BaseModel) -> Pair:
    """The pair over p^(0) = base; InputError names a file that is missing, damaged or misfits."""
    directory = Path(directory)
    if not (directory / PAIR).exists():
        raise InputError(f"{directory}: holds no {PAIR}, so no pair of this version; make it again")
    made = read_json(directory / PAIR)
    embeddings = base.output_embeddings
    source = torch.Generator(embeddings.device)  # of first values, which are replaced
    model, twist = base, None
    with reading(directory / PAIR, MISFIT, REMEDY):
        kind, form = made["model"], made["twist"]
    if kind != BASE:
        tensors = read_tensors(directory / MODEL)
        with reading(directory / MODEL, MISFIT, REMEDY):
            if kind == ADAPTER:
                adapter = Adapter(embeddings, tensors.get("scores"), source)
                model = adapted(base, restored(adapter, tensors).to(embeddings.device))
            else:
                model = base.with_network(restored(copy.deepcopy(base.network), tensors))
    if form is not None:
        tensors = read_tensors(directory / TWIST)
        with reading(directory / TWIST, MISFIT, REMEDY):
            twist = restored(make_twist(form, model, source), tensors).to(embeddings.device)
    return Pair(model, twist)


def write_module(path: Path, module: nn.Module) -> None:
    """Write the tensors of a module, copied because some may share their memory."""
    write_tensors(path, {name: value.clone() for name, value in module.state_dict().items()})


def restored(module: Any, tensors: dict[str, Tensor]) -> Any:
    """The module with these tensors; an error where they do not fit or are not finite."""
    module.load_state_dict(tensors)
    if not all(value.isfinite().all() for value in tensors.values()):
        raise ValueError("it holds NaN or infinite numbers")
    return module.requires_grad_(False)
