"""LoRA: low-rank fine-tuning of the query and value projections (Hu et al. 2021), merged on save.

    y = x (W + (alpha / r) B A)^T,   A [r, D] normal, B [D, r] zero at the start,   r = alpha = 8

The base weight W is frozen. With B = 0 the output equals the base model's to the bit. D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.gpt_neo import GPTNeo

RANK = 8
PROJECTIONS = ("q_proj", "v_proj")


class LoRALinear(nn.Module):
    """A frozen linear layer plus an update of rank r."""

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


def add_lora(model: GPTNeo, generator: torch.Generator) -> list[nn.Parameter]:
    """Freeze the model and put LoRA on all q and v projections, in place; returns what to train."""
    model.requires_grad_(False)
    added = []
    for block in model.h:
        for name in PROJECTIONS:
            lora = LoRALinear(getattr(block.attn, name), generator)
            setattr(block.attn, name, lora)
            added += [lora.a, lora.b]
    return added


def merge_lora(model: GPTNeo) -> None:
    """Fold every LoRA update into its weight, in place; the model is an ordinary GPT-Neo again."""
    for block in model.h:
        for name in PROJECTIONS:
            lora = getattr(block.attn, name)
            lora.base.weight.data += lora.b.data @ lora.a.data
            setattr(block.attn, name, lora.base)
    model.requires_grad_(True)
