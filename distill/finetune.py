"""What fine-tuning shares: the trained copy, all of it or by LoRA, and its updates in parts.

    AdamW, (beta_1, beta_2) = (0.9, 0.999), with decay of matrices only
    gradient of a mean over N rows = sum over parts of (rows of the part / N) * gradient of its mean
    LoRA   y = x (W + (alpha / r) B A)^T,   A [r, D] normal, B [D, r] zero at first, r = alpha = 8

LoRA trains A and B of the query and value projections, whose W is frozen; with B = 0 the output
equals the base model's to the bit. What has been trained is merged into W.

The paper's appendix ("Optimization") has the options of the two baselines, DPO and GRPO, and tunes
step size, decay and strength on grids. N sequences, T continuation tokens, D width.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.errors import InputError
from tsmc.interfaces import BaseModel

ROWS = 256  # sequences of one forward and backward pass, to bound the memory of logits
RANK = 8  # of LoRA
PROJECTIONS = ("q_proj", "v_proj")  # that LoRA trains


class Diverged(InputError):
    """A model whose parameters are no longer finite after training."""


@dataclass(frozen=True)
class BaselineConfig:
    """The options of a baseline."""

    learning_rate: float  # AdamW's step size
    weight_decay: float  # of matrices
    strength: float  # b, how strongly the policy is held to p^(0)
    updates: int = 1000
    batch_size: int = 1024  # N, sequences drawn for one update


class LoRALinear(nn.Module):
    """A frozen linear layer plus an update of rank r (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, generator: torch.Generator):
        super().__init__()
        size_out, size_in = base.weight.shape
        self.base = base
        a = base.weight.new_empty(RANK, size_in)
        self.a = nn.Parameter(a.normal_(std=size_in**-0.5, generator=generator))
        self.b = nn.Parameter(base.weight.new_zeros(size_out, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def add_lora(network: nn.Module, generator: torch.Generator) -> list[nn.Parameter]:
    """Freeze the network and put LoRA on all q and v projections, in place; returns what to train.

    InputError where no linear layer has such a name.
    """
    network.requires_grad_(False)
    added = []
    for parent in list(network.modules()):
        for name in PROJECTIONS:
            layer = getattr(parent, name, None)
            if isinstance(layer, nn.Linear):
                lora = LoRALinear(layer, generator)
                setattr(parent, name, lora)
                added += [lora.a, lora.b]
    if not added:
        wanted = " or ".join(PROJECTIONS)
        raise InputError(f"the network has no linear layer {wanted}; fine-tune all parameters")
    return added


def merge_lora(network: nn.Module) -> None:
    """Fold every LoRA update into its weight, in place; the network is what it was before."""
    for parent in list(network.modules()):
        for name in PROJECTIONS:
            lora = getattr(parent, name, None)
            if isinstance(lora, LoRALinear):
                lora.base.weight.data += lora.b.data @ lora.a.data
                setattr(parent, name, lora.base)
    network.requires_grad_(True)


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW groups: decay for matrices, also embeddings and LoRA, none for biases and LayerNorm."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


class Student:
    """A copy, in float32 or wider, of a plain language model in training, and its optimiser."""

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float,
        weight_decay: float,
        lora: bool,
        generator: torch.Generator,
    ):
        self.dtype = next(model.parameters()).dtype
        wide = torch.promote_types(self.dtype, torch.float32)
        # A step of 3e-5 would vanish in bfloat16, so training is in float32 at least.
        self.network = copy.deepcopy(model).to(wide).requires_grad_(True)
        self.lora = lora
        everything = list(self.network.parameters())
        self.parameters = add_lora(self.network, generator) if lora else everything
        groups = parameter_groups(self.parameters, weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate)

    def after(self, base: BaseModel) -> BaseModel:
        """The student as a language model after the prompt of `base`."""
        return base.with_network(self.network)

    def update(self, loss: Callable[..., Tensor], at_once: int, *rows: Tensor) -> float:
        """One step on the mean over rows [N, ...], loss(*rows), `at_once` at a time; that mean."""
        self.optimizer.zero_grad()
        total = 0.0
        for parts in zip(*(tensor.split(at_once) for tensor in rows), strict=True):
            share = loss(*parts) * (len(parts[0]) / len(rows[0]))
            share.backward()
            total += share.item()
        self.optimizer.step()
        return total

    def merged(self) -> nn.Module:
        """The network as it is now; with LoRA, a copy into which the updates are merged."""
        if not self.lora:
            return self.network
        network = copy.deepcopy(self.network)
        merge_lora(network)
        return network

    def finish(self) -> nn.Module:
        """The trained network in the type it came in; Diverged where it is not finite."""
        network = self.merged()
        if not all(parameter.isfinite().all() for parameter in network.parameters()):
            raise Diverged("the trained model is not finite; lower the learning rate")
        return network.to(self.dtype)


def rewards(log_phi: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """r = log phi [N] of tokens [N, T], -inf where phi is zero; InputError for NaN and +inf."""
    reward = log_phi(tokens)
    if not (reward < torch.inf).all():
        raise InputError("log phi is NaN or +inf on a sample; check the potential")
    return reward
