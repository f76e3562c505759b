"""Keys and values of a prompt and of what follows it, kept outside the model.

    prompt          [1, H, P, D/H] a layer, computed at batch 1 and seen by every row
    keys, values    [L, T, B, H, D/H], written once, position by position, and never moved
    places          [T, B]: where in the T B entries of a layer the history of each row lies

Resampling makes row b the continuation of row ancestors[b]. Only the table of places is reordered then; attention collects
a row's keys and values by it. Attention is given a list of parts, the prompt's and the rest's. `SharedPrompt` does for
teacher forcing, where nothing is reordered, and lets gradients through. All are kept in float32 or wider, which attention
is computed in. L layers, B rows, P prompt positions, T positions after it, D width, H heads.
"""

from typing import Protocol

import torch
from torch import Tensor

from tinystories.fast import at_least_float32

Part = tuple[Tensor, Tensor]
"""Keys and values of consecutive positions, both [B, H, S, D/H], or [1, H, S, D/H] where all rows see the same."""


class Cache(Protocol):
    """What attention reads and writes; `GPTNeo.hidden` moves `length`."""

    length: int

    def append(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]: ...


class SharedPrompt:
    """Keys and values of one prompt, computed at batch 1 and seen by every row of what follows it.

    The first pass through the model fills it; passes after that read it. Gradients flow into the prompt's computation.
    """

    def __init__(self):
        self.length = 0
        self.layers: list[Part] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """The parts that end with new keys and values [B, H, T, D/H]."""
        new = at_least_float32(keys), at_least_float32(values)
        if layer == len(self.layers):
            self.layers.append(new)
            return [new]
        return [self.layers[layer], new]


class KeyValueCache:
    """A prompt, and preallocated keys and values of up to T positions that `rows` texts have after it."""

    def __init__(self, prompt: SharedPrompt, rows: int, positions: int):
        keys = prompt.layers[0][0]
        _, heads, _, size = keys.shape
        self.prompt, self.length, self.reordered = prompt, prompt.length, False
        self.keys, self.values = (
            keys.new_empty(len(prompt.layers), positions, rows, heads, size) for _ in range(2)
        )  # [L, T, B, H, D/H]
        self.places = torch.arange(positions * rows, device=keys.device).view(positions, rows)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """Write new keys and values [B, H, T, D/H] behind `length`; return the parts of all the layer's so far."""
        start = self.length - self.prompt.length
        end = start + keys.shape[2]
        own = []
        for block, new in ((self.keys[layer], keys), (self.values[layer], values)):
            block[start:end] = new.permute(2, 0, 1, 3)
            own.append(self.collect(block, end).permute(1, 2, 0, 3))  # [B, H, S, D/H]
        return [self.prompt.layers[layer], (own[0], own[1])]

    def collect(self, block: Tensor, end: int) -> Tensor:
        """The first `end` positions of every row's history [S, B, H, D/H], from one layer's keys or values."""
        if not self.reordered:
            return block[:end]
        return block.flatten(0, 1).index_select(0, self.places[:end].flatten()).unflatten(0, (end, -1))

    def reorder(self, ancestors: Tensor) -> None:
        """Row b becomes a copy of row ancestors[b]; ancestors [B]."""
        end = self.length - self.prompt.length
        self.places[:end] = self.places[:end].index_select(1, ancestors)
        self.reordered = True
