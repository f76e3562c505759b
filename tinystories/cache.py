"""Keys and values of what a model has read, so that only new tokens are computed.

    keys, values    [B, H, S, D/H] in each layer, S growing with every part of the text that is read

A prompt is read at batch 1 and may be continued by any number of rows; it is not copied for them. B
rows, H heads, S positions read so far, T new positions, D width.
"""

from torch import Tensor

Part = tuple[Tensor, Tensor]
"""Keys and values of consecutive positions [B, H, S, D/H], or [1, H, S, D/H] for all rows."""


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

    def continued(self, rows: int, length: int) -> "KeyValueCache":
        """A cache that begins as this one does, for up to `rows` texts of `length` more tokens."""
        cache = KeyValueCache()
        cache.layers = [list(parts) for parts in self.layers]
        return cache

    def reorder(self, parents: Tensor) -> None:
        """Row b continues the history of row parents[b]; parents [B], any number of rows."""
        for parts in self.layers:
            for number, (keys, values) in enumerate(parts):
                if len(keys) > 1:  # what was read at batch 1 is the same for all rows
                    parts[number] = keys[parents], values[parents]
