"""An adapter, which makes a proposal q of p^(0) by moving its final hidden states.

    q(s_t | s_{0:t-1}) = softmax(h e + U e + a g),   (U, a) = MLP(h)         [.., V]

h = h_{t-1} is the final hidden state of p^(0), and e [V, D] are its output embeddings; neither is
trained. The MLP moves h by U, so what is learned about one token serves tokens with similar
embeddings as well, and one product gives the logits. g [V] are the scores of the surrogate
(`twist/surrogate.py`): an embedding of one number for each token. They may be left out.

Read as a twist of p^(0), log psi = U e + a g, the adapter has q as its twist-induced proposal. D
width, H hidden units, V vocabulary, N rows, T tokens.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.gpt_neo import at_least_float32
from twist.mlp import TwistMLP


class Adapter(nn.Module):
    """Logits of q from the hidden states of p^(0); those of p^(0) itself at first."""

    scores: Tensor | None
    embeddings: Tensor

    def __init__(self, embeddings: Tensor, scores: Tensor | None, generator: torch.Generator):
        """`embeddings` e [V, D] are those of p^(0), and `scores` g [V] or None."""
        super().__init__()
        embeddings = at_least_float32(embeddings.detach()).clone()  # [V, D]
        width = embeddings.shape[1]
        if scores is not None:
            embeddings = torch.cat([embeddings, scores[:, None].to(embeddings)], 1)  # [V, D + 1]
        outputs = embeddings.shape[1]
        self.register_buffer("scores", scores)
        self.shift = TwistMLP(width, outputs, generator)
        # It is not trained, and not saved: it belongs to p^(0).
        self.register_buffer("embeddings", embeddings, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of q [..., V] after hidden states [..., D]."""
        # Shift first, then one product with the embeddings, which is the expensive step.
        unmoved = at_least_float32(hidden)
        if self.scores is not None:
            unmoved = F.pad(unmoved, (0, 1))  # p^(0) does not read g: its column is zero
        return F.linear(unmoved + self.shift(hidden), self.embeddings)

    def tilt(self, hidden: Tensor) -> Tensor:
        """log psi of every next token [..., V]: what is added to the logits of p^(0)."""
        return F.linear(self.shift(hidden).to(self.embeddings.dtype), self.embeddings)


def adapted(base: Any, adapter: Adapter) -> Any:
    """The language model q: p^(0) = base, whose logits an adapter makes; it is in `q.adapter`."""
    assert not isinstance(base, nn.Module), "a module cannot have another head"
    q = copy.copy(base)
    q.head = adapter
    q.adapter = adapter
    return q
