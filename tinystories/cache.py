"""Keys and values of what a model has read, kept outside the model: a new token is then read alone.

    keys, values    [B, H, S, D/H] a layer, grown at the end by every part of the text that is read

A new row may go on with the history of any old one: its keys and values are copies of that row's, and a text read at batch 1
may be continued by any number of rows. B rows, H heads, S positions read so far, D width.
"""

import torch
from torch import Tensor


class KeyValueCache:
    """The history that attention looks back on, layer by layer."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]] | None = None):
        self.layers = layers or []  # keys and values [B, H, S, D/H] of each layer

    @property
    def length(self) -> int:
        """S, the positions read so far."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values [B, H, T, D/H] of a layer; returns those of its whole history."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
        else:
            old_keys, old_values = (old.expand(len(keys), -1, -1, -1) for old in self.layers[layer])
            self.layers[layer] = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
        return self.layers[layer]

    def continued(self, rows: int, length: int) -> "KeyValueCache":
        """A cache that begins as this one does; how many rows and tokens may follow need not be known."""
        return KeyValueCache(list(self.layers))

    def reorder(self, parents: Tensor) -> None:
        """Row b goes on with the history of what was row parents[b]; parents [B], any number of rows."""
        self.layers = [(k.index_select(0, parents), v.index_select(0, parents)) for k, v in self.layers]
