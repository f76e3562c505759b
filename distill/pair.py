"""A trained pair (p^(m), psi^(m)), and its file.

model.*      p^(m), a fine-tuned network: what differs from p^(0)
twist.*      psi^(m), unless it is 1
learner.*    what the learner needs to go on, if anything
"""

import copy
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tinystories.decoder import Conditional
from tinystories.load import write_tensors
from twist.mlp import TwistMLP


@dataclass(frozen=True)
class Pair:
    """What twisted SMC runs with: a language model and its twist."""

    model: Conditional  # p^(m)
    twist: Any  # psi^(m): a module, or None for psi = 1


def save_pair(path: Path, pair: Pair, base: Conditional, state: dict[str, Tensor]) -> None:
    """Write what a pair has beside p^(0) = base, and the state of its learner."""
    kind = type(pair.model)  # kept as "module:Class" where it is another than that of p^(0)
    is_other = kind is not type(base)
    known = {} if is_other else base.network.state_dict()
    parts: dict[str, dict[str, Tensor]] = {"learner": state, "model": {}}
    for name, tensor in pair.model.network.state_dict().items():
        if name not in known or not torch.equal(tensor, known[name]):
            parts["model"][name] = tensor
    if pair.twist is not None:
        parts["twist"] = pair.twist.state_dict()
    tensors = {}
    for part, found in parts.items():  # clones, because some may share their memory
        tensors |= {f"{part}.{name}": tensor.clone() for name, tensor in found.items()}
    write_tensors(path, tensors, model=f"{kind.__module__}:{kind.__name__}" if is_other else "")


def load_pair(path: Path, base: Conditional) -> tuple[Pair, dict[str, Tensor]]:
    """The pair over p^(0) = base, and the state of its learner."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "twist": {}, "learner": {}}
    with safe_open(path, "pt", device=str(base.prompt.device)) as file:
        kind = file.metadata()["model"]
        for name in file.keys():  # noqa: SIM118 (the file is no dictionary)
            part, _, rest = name.partition(".")
            parts[part][rest] = file.get_tensor(name)
    model, twist = base, None
    if kind:
        module, _, class_name = kind.partition(":")
        model = getattr(importlib.import_module(module), class_name).load(base, parts["model"])
    elif parts["model"]:
        network = copy.deepcopy(base.network)
        network.load_state_dict(network.state_dict() | parts["model"])
        model = base.with_network(network.requires_grad_(False))
    if parts["twist"]:
        twist = TwistMLP(base.width, base.vocab_size, torch.Generator(base.prompt.device))
        twist.load_state_dict(parts["twist"])
        twist.requires_grad_(False)
    return Pair(model, twist), parts["learner"]
