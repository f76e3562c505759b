"""The caches of the fast networks: all rows share what was read at batch 1, and nothing that is written ever moves.

    prompt          [1, H, P, D/H] a layer, read at batch 1 and seen by every row
    keys, values    [L, T, B, H, D/H], of the tokens behind the prompt, written once, position by position
    places          [T, B]: where in the T B entries of a layer the history of each row lies

Resampling makes row b the continuation of row ancestors[b]. Only the table of places is reordered then, and a row's
keys and values are collected by it. Attention is given a history as a list of parts. L layers, B rows, P positions of
the prompt, T behind it, S = P + T, H heads, D width.
"""

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]
"""Keys and values of consecutive positions, both [B, H, S, D/H], or [1, H, S, D/H] where all rows see the same."""


class PartsCache:
    """A history in the parts that were read one after the other, the first at batch 1; gradients flow through it."""

    def __init__(self):
        self.layers: list[list[Part]] = []

    @property
    def length(self) -> int:
        """S, the positions read so far."""
        return sum(keys.shape[2] for keys, _ in self.layers[0]) if self.layers else 0

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """Add new keys and values [B, H, T, D/H] of a layer; returns the parts of its whole history."""
        if layer == len(self.layers):
            self.layers.append([])
        self.layers[layer].append((keys, values))
        return self.layers[layer]

    def repeat(self, rows: int, length: int) -> "PlacesCache":
        """A cache of `rows` texts that all begin with this one; up to `length` tokens may follow."""
        return PlacesCache(self, rows, length)


class PlacesCache:
    """A prompt, and preallocated keys and values of up to `length` positions that `rows` texts have behind it."""

    def __init__(self, prompt: PartsCache, rows: int, length: int):
        keys, _ = prompt.layers[0][0]
        _, heads, _, size = keys.shape
        self.prompt, self.length, self.reordered = prompt, prompt.length, False
        self.keys, self.values = (
            keys.new_empty(len(prompt.layers), length, rows, heads, size) for _ in range(2)
        )  # [L, T, B, H, D/H]
        self.places = torch.arange(length * rows, device=keys.device).view(length, rows)

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """Write new keys and values [B, H, T, D/H] of a layer behind `length`; returns all the layer's so far."""
        start = self.length - self.prompt.length
        end = start + keys.shape[2]
        own = []
        for block, new in ((self.keys[layer], keys), (self.values[layer], values)):
            block[start:end] = new.permute(2, 0, 1, 3)
            own.append(self.collect(block, end).permute(1, 2, 0, 3))  # [B, H, T, D/H]
        if layer == len(self.keys) - 1:
            self.length += keys.shape[2]
        return [*self.prompt.layers[layer], (own[0], own[1])]

    def collect(self, block: Tensor, end: int) -> Tensor:
        """The first `end` positions of every row's history [T, B, H, D/H], from one layer's keys or values."""
        if not self.reordered:
            return block[:end]
        return block.flatten(0, 1).index_select(0, self.places[:end].flatten()).unflatten(0, (end, -1))

    def reorder(self, ancestors: Tensor) -> None:
        """Row b becomes a copy of row ancestors[b]; ancestors [B]."""
        end = self.length - self.prompt.length
        self.places[:end] = self.places[:end].index_select(1, ancestors)
        self.reordered = True
