"""A trained pair (p^(m), psi^(m)), and its file.

    model.*      p^(m): a fine-tuned network, or an adapter of p^(0); p^(m) may also be p^(0)
    twist.*      psi^(m), which may also be 1

One safetensors file holds both; its metadata say what they are.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distill.pooled.adapter import Adapted, Adapter
from tinystories.decoder import Conditional
from tinystories.files import read_metadata, read_tensors, reading, write_tensors
from twist.mlp import TwistMLP

# What p^(m) may be; an adapter, of --learner pooled alone, moves the logits of p^(0).
BASE, NETWORK, ADAPTER = "p^(0)", "fine-tuned", "adapter"


@dataclass(frozen=True)
class Pair:
    """What twisted SMC runs with: a language model and its twist."""

    model: Any  # p^(m), a Conditional
    twist: Any  # psi^(m): a module, or None for psi = 1

    def modules(self, base: Conditional) -> dict[str, nn.Module]:
        """What the pair has beside p^(0) = base: "model" and "twist", where there are any."""
        found = {}
        if isinstance(self.model, Adapted):
            found["model"] = self.model.adapter
        elif self.model is not base:
            found["model"] = self.model.network
        if self.twist is not None:
            found["twist"] = self.twist
        return found


def save_pair(path: str | Path, pair: Pair, base: Conditional) -> None:
    """Write what a pair has beside p^(0) = base, as `load_pair` reads it."""
    kind = BASE if pair.model is base else NETWORK
    if isinstance(pair.model, Adapted):
        kind = ADAPTER
    tensors = {}
    for part, module in pair.modules(base).items():
        for name, tensor in module.state_dict().items():
            tensors[f"{part}.{name}"] = tensor.clone()  # some may share their memory
    write_tensors(Path(path), tensors, model=kind)


def load_pair(path: str | Path, base: Conditional) -> Pair:
    """The pair over p^(0) = base; ValueError names a file that is missing, damaged or misfits."""
    path = Path(path)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "twist": {}}
    kind = read_metadata(path).get("model")
    remedy = "restore the run's own file, or make the run again"
    with reading(path, "holds no pair of this version and this model", remedy):
        for name, tensor in read_tensors(path).items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
            if not tensor.isfinite().all():
                raise ValueError(f"{name} holds NaN or infinite numbers")
        source = torch.Generator(base.prompt.device)  # of first values, which are replaced
        model, twist = base, None
        if kind == ADAPTER:
            has_scores = "scores" in parts["model"]
            scores = torch.zeros(base.vocab_size) if has_scores else None  # loaded below
            adapter = Adapter(base, scores, source).to(base.prompt.device)
            adapter.load_state_dict(parts["model"])
            model = Adapted(base, adapter.requires_grad_(False))
        elif kind == NETWORK:
            network = copy.deepcopy(base.network)
            network.load_state_dict(parts["model"])
            model = base.with_network(network.requires_grad_(False))
        elif kind != BASE:
            raise ValueError(f"its model is {kind!r}")
        if parts["twist"]:
            twist = TwistMLP(base.width, base.vocab_size, source)
            twist.load_state_dict(parts["twist"])
            twist.requires_grad_(False)
    return Pair(model, twist)
