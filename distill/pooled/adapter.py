"""An adapter, which makes a proposal q of p^(0) by moving its final hidden states.

    logits of q = head(h + U) + a g,   (U, a) = MLP(h)         [.., V]

h = h_{t-1} is the final hidden state of p^(0), and `head` is whatever makes its logits: h e for
output embeddings e [V, D], with a bias, a scale, a cap or a mask where p^(0) has one. Neither is
trained. The MLP moves h by U, so what is learned about one token serves tokens with similar
embeddings as well, and one product gives the logits. g [V] are the scores of the surrogate
(`surrogate.py`): an embedding of one number for each token. They may be left out. At first U
and a are zero, and a fit may begin at a = 1: at p^(0) tilted by the scores.

psi = q / p^(0) is the twist that has q as its proposal. D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tinystories.decoder import Conditional
from tinystories.gpt_neo import at_least_float32
from twist.mlp import TwistMLP


class Adapter(nn.Module):
    """Logits of q from the hidden states of p^(0); those of p^(0) at first."""

    scores: Any  # g [V], or None

    def __init__(self, base: Conditional, scores: Tensor | None, generator: torch.Generator):
        """For p^(0) = base, with `scores` g [V] or None."""
        super().__init__()
        self.base = base  # no module, so it is neither trained nor saved here
        self.register_buffer("scores", scores)
        outputs = base.width + (scores is not None)
        self.shift = TwistMLP(base.width, outputs, generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of q [..., V] after hidden states [..., D]."""
        moved = self.shift(hidden)  # [..., D] or [..., D + 1]
        # Shift first, then one product with the embeddings, which is the expensive step.
        width = self.base.width
        logits = self.base.head((at_least_float32(hidden) + moved[..., :width]).to(hidden.dtype))
        if self.scores is None:
            return logits
        return logits + moved[..., width:] * self.scores


class Adapted(Conditional):
    """The language model q: p^(0) = base, whose logits an adapter makes."""

    def __init__(self, base: Conditional, adapter: Adapter):
        super().__init__(base.prompt, base.length, base.width, base.vocab_size, base.end)
        self.base = base
        self.adapter = adapter

    def cache(self) -> Any:
        return self.base.cache()

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        return self.base.read(ids, cache)

    def head(self, hidden: Tensor) -> Tensor:
        return self.adapter(hidden)
