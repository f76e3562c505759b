"""Keys and values of a prompt and its continuations, kept outside the model.

    keys, values   [L, S, B, D]   position by position, so that appending and reordering move whole blocks
    length         positions filled so far

A prompt is prefilled once at batch 1 and copied to all B rows. From then on the rows differ only behind the prompt,
so reordering by ancestors moves only those positions. `SharedPrompt` does without the copies where there is nothing to
reorder, and lets gradients through. Both are kept in float32 or wider, which attention is computed in.
L layers, B rows, S positions, D width, H heads.
"""

from typing import Protocol

import torch
from torch import Tensor

from tinystories.linear import at_least_float32


class Cache(Protocol):
    """What attention reads and writes; `GPTNeo.hidden` moves `length`."""

    length: int

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


class KeyValueCache:
    """Preallocated keys and values of every layer."""

    def __init__(self, layers: int, rows: int, width: int, positions: int, *, dtype, device):
        shape = (layers, positions, rows, width)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.shared = 0

    @classmethod
    def like(cls, model, rows: int, positions: int) -> "KeyValueCache":
        """An empty cache of the model's shape and device for `rows` texts of up to `positions` tokens."""
        config, weight = model.config, model.wte.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return cls(config.num_layers, rows, config.hidden_size, positions, dtype=dtype, device=weight.device)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, H, T, D/H] behind `length`; return all of the layer's so far [B, H, S, D/H]."""
        heads, end = keys.shape[1], self.length + keys.shape[2]
        parts = []
        for block, new in ((self.keys[layer], keys), (self.values[layer], values)):
            block = block.unflatten(-1, (heads, -1))[:end]  # [S, B, H, D/H]
            block[self.length :] = new.permute(2, 0, 1, 3)
            parts.append(block.permute(1, 2, 0, 3))  # [B, H, S, D/H]
        return parts[0], parts[1]

    def share(self, prompt: "KeyValueCache") -> None:
        """Start every row from a prompt that was prefilled at batch 1."""
        self.length = self.shared = prompt.length
        self.keys[:, : self.length] = prompt.keys[:, : self.length]
        self.values[:, : self.length] = prompt.values[:, : self.length]

    def reorder(self, ancestors: Tensor) -> None:
        """Row b becomes a copy of row ancestors[b]; ancestors [B]. The shared prompt stays where it is."""
        for block in (*self.keys, *self.values):  # layer by layer, so that the copies are small
            behind = block[self.shared : self.length]  # [S, B, D]
            behind.copy_(behind.index_select(1, ancestors))


class SharedPrompt:
    """Keys and values of one prompt, computed at batch 1 and seen by every row of what follows it.

    The first pass through the model fills it; passes after that read it. Gradients flow into the prompt's computation.
    """

    def __init__(self):
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D/H] behind those of the prompt: [B, H, S, D/H]."""
        new = at_least_float32(keys), at_least_float32(values)
        if layer == len(self.layers):
            self.layers.append(new)
            return new
        rows = len(keys)
        return tuple(
            torch.cat([old.expand(rows, -1, -1, -1), x], 2) for old, x in zip(self.layers[layer], new, strict=True)
        )
