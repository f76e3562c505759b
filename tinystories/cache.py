"""Key/value cache of many continuations of one prompt, kept outside the model.

    keys, values   [L, B, H, S, D/H]   allocated once for S = prompt + continuation positions
    length         positions filled so far

A prompt is prefilled once at batch 1 and copied to all B rows. From then on the rows differ only behind the prompt,
so reordering by ancestors moves only those positions. L layers, H heads, D width.
"""

import torch
from torch import Tensor


class KeyValueCache:
    """Preallocated keys and values of every layer; `GPTNeo.hidden` appends to it and moves `length`."""

    def __init__(self, layers: int, rows: int, heads: int, positions: int, head_size: int, *, dtype, device):
        shape = (layers, rows, heads, positions, head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.shared = 0

    @classmethod
    def like(cls, model, rows: int, positions: int) -> "KeyValueCache":
        """An empty cache of the model's shape, type and device for `rows` texts of up to `positions` tokens."""
        config, weight = model.config, model.wte.weight
        head_size = config.hidden_size // config.num_heads
        sizes = (config.num_layers, rows, config.num_heads, positions, head_size)
        return cls(*sizes, dtype=weight.dtype, device=weight.device)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, H, T, D/H] behind `length`; return all of the layer's so far [B, H, S, D/H]."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def share(self, prompt: "KeyValueCache") -> None:
        """Start every row from a prompt that was prefilled at batch 1."""
        self.length = self.shared = prompt.length
        self.keys[:, :, :, : self.length] = prompt.keys[:, :, :, : self.length]
        self.values[:, :, :, : self.length] = prompt.values[:, :, :, : self.length]

    def reorder(self, ancestors: Tensor) -> None:
        """Row b becomes a copy of row ancestors[b]; ancestors [B]. The shared prompt stays where it is."""
        behind = slice(self.shared, self.length)
        self.keys[:, :, :, behind] = self.keys[:, :, :, behind].index_select(1, ancestors)
        self.values[:, :, :, behind] = self.values[:, :, :, behind].index_select(1, ancestors)
