"""Keys and values of what a model has read, so that only new tokens are computed.

    keys, values    [B, H, S, D/H] in each layer, S growing with every part of the text that is read

A prompt is read at batch 1 and may be continued by any number of rows; it is not copied for them.
What follows it lies in blocks that are allocated once, and rows are moved only when they change.
B rows, H heads, S positions read so far, of which P are the prompt's, T new positions, D width.
"""

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]  # keys and values of some positions, of each row or of all rows


class KeyValueCache:
    """The history that attention looks back on: in each layer, the parts read so far."""

    def __init__(self):
        self.layers: list[list[Part]] = []

    @property
    def length(self) -> int:
        """S, the positions read so far."""
        return sum(keys.shape[2] for keys, _ in self.layers[0]) if self.layers else 0

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """Add new keys and values [B, H, T, D/H] of a layer; returns all parts of its history."""
        if layer == len(self.layers):
            self.layers.append([])
        self.layers[layer].append((keys, values))
        return self.layers[layer]


class RowsCache:
    """A prompt at batch 1, and up to `rows` rows of `length` tokens behind it, without gradient.

    Reordered rows are collected when their layer is computed next, into a spare block that then
    takes the old one's place. Memory therefore stays constant however often rows are reordered.
    """

    def __init__(self, prompt: KeyValueCache, rows: int, length: int):
        keys = prompt.layers[0][0][0]  # [1, H, P, D/H]
        self.prompt = prompt
        self.most = length
        self.length = prompt.length
        self.rows = 1
        shape = (length * rows, keys.shape[1], keys.shape[3])  # position by position
        self.blocks = [[keys.new_empty(shape), keys.new_empty(shape)] for _ in prompt.layers]
        self.spare = keys.new_empty(shape)
        self.sources: Tensor | None = None  # [S - P times B] places of reordered entries

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """As `KeyValueCache.parts`."""
        written = (self.write(layer, 0, keys), self.write(layer, 1, values))
        if layer == len(self.blocks) - 1:
            self.length += keys.shape[2]
            self.sources = None
        return [*self.prompt.layers[layer], written]

    def write(self, layer: int, kind: int, new: Tensor) -> Tensor:
        """Append keys (kind 0) or values (1) [B, H, T, D/H] to a layer; returns all its own."""
        if self.sources is not None:
            old = self.blocks[layer][kind]
            torch.index_select(old, 0, self.sources, out=self.spare[: len(self.sources)])
            self.blocks[layer][kind] = self.spare
            self.spare = old
        start = self.length - self.prompt.length
        end = start + new.shape[2]
        block = self.blocks[layer][kind][: self.most * self.rows]
        block = block.view(self.most, self.rows, *block.shape[1:])  # [most, B, H, D/H]
        block[start:end] = new.permute(2, 0, 1, 3)
        return block[:end].permute(1, 2, 0, 3)  # [B, H, end, D/H]

    def reorder(self, parents: Tensor) -> None:
        """Row b continues the history of row parents[b]; parents [B], any number of rows."""
        written = self.length - self.prompt.length
        places = self.sources
        if places is None:
            places = torch.arange(written * self.rows, device=parents.device)
        self.sources = places.view(written, self.rows)[:, parents].flatten()
        self.rows = len(parents)


Cache = KeyValueCache | RowsCache
