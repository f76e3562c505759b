"""The caches of the fast networks: all rows share what was read at batch 1, and what follows is moved only when rows change.

    prompt      [1, H, P, D/H] a layer, read at batch 1 and seen by every row
    blocks      [T N, H, D/H] a layer, keys and values of the tokens behind the prompt, position by position B rows of up to N

Where row b is to go on with the history of another row, each layer's entries are collected in the new order when the layer is
next computed, in a spare block that changes places with the old one: memory stays the same however often rows change. Attention
is given a history as a list of parts. L layers, B rows, P positions of the prompt, T behind it, S = P + T, H heads, D width.
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

    def continued(self, rows: int, length: int) -> "RowsCache":
        """A cache of up to `rows` texts that all begin with this one; up to `length` tokens may follow."""
        return RowsCache(self, rows, length)


class RowsCache:
    """A prompt, and preallocated keys and values that up to `rows` rows have behind it, `length` positions each; no gradients.

    There is one row until `reorder` says otherwise.
    """

    def __init__(self, prompt: PartsCache, rows: int, length: int):
        self.prompt, self.most, self.length, self.rows = prompt, length, prompt.length, 1
        keys, _ = prompt.layers[0][0]
        self.entry = keys.shape[1], keys.shape[3]  # H, D/H
        self.blocks = [[keys.new_empty(length * rows, *self.entry) for _ in range(2)] for _ in prompt.layers]
        self.spare = keys.new_empty(length * rows, *self.entry)
        self.sources: Tensor | None = None  # [T B] where the entries of reordered rows lie among those of the old ones

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """Write new keys and values [B, H, T, D/H] of a layer behind `length`; returns all the layer's so far."""
        start = self.length - self.prompt.length
        end = start + keys.shape[2]
        own = []
        for kind, new in enumerate((keys, values)):
            if self.sources is not None:
                self.collect(layer, kind, self.sources)
            block = self.blocks[layer][kind][: self.most * self.rows].view(self.most, self.rows, *self.entry)
            block[start:end] = new.permute(2, 0, 1, 3)
            own.append(block[:end].permute(1, 2, 0, 3))  # [B, H, T, D/H]
        if layer == len(self.blocks) - 1:
            self.length, self.sources = self.length + keys.shape[2], None
        return [*self.prompt.layers[layer], (own[0], own[1])]

    def collect(self, layer: int, kind: int, sources: Tensor) -> None:
        """Put a layer's keys (kind 0) or values (1) into the order of `sources`."""
        old, new = self.blocks[layer][kind], self.spare
        torch.index_select(old, 0, sources, out=new[: len(sources)])
        self.blocks[layer][kind], self.spare = new, old

    def reorder(self, parents: Tensor) -> None:
        """Row b goes on with the history of what was row parents[b]; parents [B], any number of rows."""
        written = self.length - self.prompt.length
        places = torch.arange(written * self.rows, device=parents.device) if self.sources is None else self.sources
        self.sources = places.view(written, self.rows)[:, parents].flatten()  # [T B]
        self.rows = len(parents)
