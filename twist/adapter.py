"""An adapter that makes p^(m) of p^(0), and states that remember the score of what was written.

    p^(m)(s_t | s_{0:t-1}) = softmax(h e + U e + a g),   (U, a) = MLP(h, z)        [.., V]
    z_{t-1} = sum_{u < t} g[s_u]                         a running sum of scores   [..]

h = h_{t-1} is the final hidden state of p^(0) and e [V, D] are its output weights; neither is
trained. The MLP moves the hidden state by U, so what is learned about a token carries over to
tokens with similar embeddings, and one product gives the logits. g [V] are the scores of the
surrogate (`twist/surrogate.py`), an embedding of one number a token. Without them U and h are all.

The adapter is a twist of p^(0) as well: with log psi = U e + a g, p^(m) is the proposal of p^(0).
D width, H hidden units, V vocabulary, B rows, T positions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.gpt_neo import GPTNeo, Linear, at_least_float32
from twist.mlp import TwistMLP


class Adapter(nn.Module):
    """Logits of p^(m) from the states of p^(0); those of p^(0) itself at first."""

    scores: Tensor | None

    def __init__(
        self,
        network: GPTNeo,
        scores: Tensor | None,
        has_memory: bool,
        hidden_units: int,
        generator: torch.Generator,
    ):
        """`network` is p^(0), `scores` g [V] or None; with `has_memory` the states end with z."""
        super().__init__()
        embeddings = at_least_float32(network.output_weight.detach()).clone()  # [V, D]
        vocab_size, self.width = embeddings.shape
        if scores is not None:
            embeddings = torch.cat([embeddings, scores[:, None].to(embeddings)], 1)  # [V, D + 1]
        outputs = embeddings.shape[1]
        self.has_memory = has_memory
        self.register_buffer("scores", scores)
        self.shift = TwistMLP(self.width + has_memory, hidden_units, outputs, generator)
        self.products = Linear(outputs, vocab_size, bias=False, device="meta")
        del self.products.weight
        self.products.register_buffer("weight", embeddings, persistent=False)  # is not saved

    @classmethod
    def like(cls, tensors: dict[str, Tensor], network: GPTNeo) -> "Adapter":
        """One of the sizes of saved tensors, with the scores among them."""
        hidden_units, width = tensors["shift.first.weight"].shape
        has_memory = width > network.config.hidden_size
        return cls(network, tensors.get("scores"), has_memory, hidden_units, torch.Generator())

    @property
    def memory(self) -> Tensor | None:
        """The scores g [V] whose sum z the states end with; None where they have no z."""
        return self.scores if self.has_memory else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of p^(m) [..., V] after states [..., D], or [..., D + 1] with z."""
        own = at_least_float32(hidden[..., : self.width])
        own = own if self.scores is None else F.pad(own, (0, 1))  # p^(0) does not read g
        return self.products(own + self.shift(hidden))

    def tilt(self, hidden: Tensor) -> Tensor:
        """What is added to the logits of p^(0) [..., V]; as a twist of p^(0) it proposes p^(m)."""
        return self.products(self.shift(hidden))


class AdaptedGPTNeo(nn.Module):
    """A GPT-Neo whose states remember z where there are scores, and whose head may be an adapter.

    It serves `tinystories.Conditional` as a GPTNeo does.
    """

    def __init__(self, network: GPTNeo, scores: Tensor | None, adapter: Adapter | None = None):
        """`network` plain or packed; `scores` g [V] make states [.., D + 1] that end with z."""
        super().__init__()
        self.network = network
        self.config = network.config
        self.scores = scores
        self.adapter = adapter

    def new_cache(self) -> "ScoredCache":
        """An empty cache."""
        return ScoredCache(self.network.new_cache())

    def hidden(self, ids: Tensor, cache: "ScoredCache") -> Tensor:
        """States [B, T, D + 1] of the tokens ids [B, T] behind what the cache holds."""
        hidden = self.network.hidden(ids, cache.inner)  # [B, T, D]
        if self.scores is None:
            return hidden
        z = cache.score + self.scores[ids].cumsum(1)  # [B, T]
        cache.score = z[:, -1:]
        return torch.cat([hidden, z[..., None].to(hidden)], -1)

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of states [..., D + 1]."""
        if self.adapter is not None:
            return self.adapter(hidden)
        return self.network.head(hidden[..., : self.config.hidden_size])


class ScoredCache:
    """A cache of keys and values, and z of every row."""

    def __init__(self, inner: Any, score: Tensor | float = 0.0):
        self.inner = inner  # KeyValueCache or RowsCache
        self.score = score  # [B, 1]

    def continued(self, rows: int, length: int) -> "ScoredCache":
        """A cache that begins as this one does, for up to `rows` texts of `length` more tokens."""
        return ScoredCache(self.inner.continued(rows, length), self.score)

    def reorder(self, parents: Tensor) -> None:
        """Row b continues the history of row parents[b]; parents [B], any number of rows."""
        self.inner.reorder(parents)
        if isinstance(self.score, Tensor):
            self.score = self.score[parents]
