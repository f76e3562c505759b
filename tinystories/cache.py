"""Keys and values of what a model has read, so that only new tokens are computed.

    keys, values    [B, H, S, D/H] in each layer, S growing with every part of the text that is read

A prompt is read at batch 1 and may be continued by any number of rows; it is not copied for them.
B rows, H heads, S positions read so far, T new positions, D width.
"""

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]  # keys and values of some positions, of each row or of all rows


class KeyValueCache:
    """The history that attention looks back on: in each layer a first part, and the rest."""

    def __init__(self):
        self.layers: list[list[Part]] = []

    @property
    def length(self) -> int:
        """S, the positions read so far."""
        return sum(keys.shape[2] for keys, _ in self.layers[0]) if self.layers else 0

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part]:
        """Add new keys and values [B, H, T, D/H] of a layer; returns both parts of its history."""
        if layer == len(self.layers):
            self.layers.append([])
        parts = self.layers[layer]
        if len(parts) == 2:
            old_keys, old_values = parts.pop()
            keys = torch.cat([old_keys, keys], 2)
            values = torch.cat([old_values, values], 2)
        parts.append((keys, values))
        return parts

    def reorder(self, parents: Tensor) -> None:
        """Row b continues the history of row parents[b]; parents [B], any number of rows."""
        for parts in self.layers:
            if len(parts) == 2:  # the first part, the prompt, serves every row
                keys, values = parts[1]
                parts[1] = (keys.index_select(0, parents), values.index_select(0, parents))
