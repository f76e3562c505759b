"""What fine-tuning shares: the trained copy, all of it or by LoRA, its updates, its best values.

AdamW, (beta_1, beta_2) = (0.9, 0.999), with decay .01
LoRA   y = x (W + (alpha / r) B A)^T,   A [r, D] normal, B [D, r] zero at first, r = alpha = 8,
       of the query and value projections; then W + B A replaces W. D width.
"""

import copy
import re

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

RANK = 8  # of LoRA
# What LoRA trains: q_proj, v_proj, q_lin, query, value; fused: qkv_proj, Wqkv, query_key_value...
PROJECTIONS = re.compile(r"(q|v|query|value)(_\w+)?|\w*qkv\w*|c_attn|in_proj", re.IGNORECASE)


class Best:
    """The parameters of a network with the least loss on texts held out."""

    def __init__(self, network: nn.Module, patience: int):
        """A fit is over when `patience` further checks have found no lower loss."""
        self.network = network
        self.patience = patience
        self.losses: list[float] = []
        self.values: dict[str, Tensor] = {}

    def is_over(self, loss: float) -> bool:
        """Note the loss of the network in training; whether the fit has passed its best."""
        self.losses.append(loss)
        best = self.losses.index(min(self.losses))
        if best == len(self.losses) - 1:
            self.values = copy.deepcopy(self.network.state_dict())
        return best + self.patience < len(self.losses)

    def restore(self) -> None:
        """Give the network its best parameters."""
        self.network.load_state_dict(self.values)


class LoRA(nn.Module):
    """An update of rank r of a weight W (Hu et al. 2021)."""

    def __init__(self, weight: Tensor, generator: Generator):
        super().__init__()
        size_out, size_in = weight.shape
        a = weight.new_empty(RANK, size_in)
        self.a = nn.Parameter(a.normal_(std=size_in**-0.5, generator=generator))
        self.b = nn.Parameter(weight.new_zeros(size_out, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a  # W + B A


def add_lora(network: nn.Module, generator: Generator) -> list[nn.Module]:
    """Freeze the network and put LoRA on its query and value projections; returns these layers."""
    network.requires_grad_(False)
    added = []
    for name, layer in list(network.named_modules()):
        weight = getattr(layer, "weight", None)
        is_projection = PROJECTIONS.fullmatch(name.rpartition(".")[2])
        if is_projection and isinstance(weight, Tensor) and weight.ndim == 2:
            parametrize.register_parametrization(layer, "weight", LoRA(weight, generator))
            added.append(layer)
    if not added:
        raise ValueError("the network has no query or value projection that LoRA knows")
    return added


class Student:
    """A copy, in float32 or wider, of a language model's network in training, and its optimiser."""

    def __init__(self, network: nn.Module, learning_rate: float, lora: bool, generator: Generator):
        self.dtype = next(network.parameters()).dtype
        wide = torch.promote_types(self.dtype, torch.float32)
        # A step of 3e-5 would vanish in bfloat16, so training is in float32 at least.
        self.network = copy.deepcopy(network).to(wide).requires_grad_(True)
        self.lora = add_lora(self.network, generator) if lora else []  # the layers that have it
        parameters = [one for one in self.network.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)

    def step(self) -> None:
        """One update with the accumulated gradients, which are zeroed."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> nn.Module:
        """The trained network, in the type it came in; W becomes W + B A."""
        for layer in self.lora:
            parametrize.remove_parametrizations(layer, "weight")
        return self.network.to(self.dtype)
