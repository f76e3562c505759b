"""The cache of packed networks: rows share the prompt, and are moved only when they change.

    prompt      [1, H, P, D/H] in each layer, read at batch 1 and seen by every row
    blocks      [T N, H, D/H] in each layer: keys and values behind the prompt, position by position

When row b is to continue another row's history, the entries of each layer are collected in the new
order as soon as that layer is computed next, into a spare block that then takes the old one's
place. Memory therefore stays constant however often rows are reordered. N rows at most, B rows now,
P positions of the prompt, T behind it, S = P + T, H heads, D width.
"""

import torch
from torch import Tensor

from tinystories.cache import KeyValueCache, Part


class PromptCache(KeyValueCache):
    """What is read before decoding; `continued` preallocates blocks for the rows that follow."""

    def continued(self, rows: int, length: int) -> "RowsCache":
        """A cache of up to `rows` texts that begin with this one and have `length` more tokens."""
        return RowsCache(self, rows, length)


class RowsCache:
    """A prompt, and keys and values of up to `rows` rows behind it; there is one row at first."""

    def __init__(self, prompt: KeyValueCache, rows: int, length: int):
        keys = prompt.layers[0][0][0]  # [1, H, P, D/H]
        self.prompt = prompt
        self.most = length
        self.length = prompt.length
        self.rows = 1
        self.entry = (keys.shape[1], keys.shape[3])  # H, D/H
        shape = (length * rows, *self.entry)
        self.blocks = [[keys.new_empty(shape), keys.new_empty(shape)] for _ in prompt.layers]
        self.spare = keys.new_empty(shape)
        self.sources: Tensor | None = None  # [T B] places of reordered entries among the old ones

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """Write new keys and values [B, H, T, D/H] of a layer; returns all parts of its history."""
        own_keys = self.write(layer, 0, keys)
        own_values = self.write(layer, 1, values)
        if layer == len(self.blocks) - 1:
            self.length += keys.shape[2]
            self.sources = None
        return [*self.prompt.layers[layer], (own_keys, own_values)]

    def write(self, layer: int, kind: int, new: Tensor) -> Tensor:
        """Append keys (kind 0) or values (1) [B, H, T, D/H] to a layer; returns all its own."""
        if self.sources is not None:
            self.collect(layer, kind)
        start = self.length - self.prompt.length
        end = start + new.shape[2]
        block = self.blocks[layer][kind][: self.most * self.rows]
        block = block.view(self.most, self.rows, *self.entry)  # [T, B, H, D/H]
        block[start:end] = new.permute(2, 0, 1, 3)
        return block[:end].permute(1, 2, 0, 3)  # [B, H, T, D/H]

    def collect(self, layer: int, kind: int) -> None:
        """Bring a layer's keys or values into the order of `sources`."""
        old = self.blocks[layer][kind]
        torch.index_select(old, 0, self.sources, out=self.spare[: len(self.sources)])
        self.blocks[layer][kind] = self.spare
        self.spare = old

    def reorder(self, parents: Tensor) -> None:
        """Row b continues the history of row parents[b]; parents [B], any number of rows."""
        written = self.length - self.prompt.length
        places = self.sources
        if places is None:
            places = torch.arange(written * self.rows, device=parents.device)
        self.sources = places.view(written, self.rows)[:, parents].flatten()  # [T B]
        self.rows = len(parents)
