"""The twist tied to the language model's token embeddings: log psi(s_{1:t}) = U(h_{t-1}) e[s_t].

    h_{t-1} [.., D] -> TwistMLP -> U [.., D] -> products with e [V, D] -> log psi [.., V]

U is `TwistMLP` with D outputs in place of V. e are the output weights of p^(0), in GPT-Neo its
embeddings, and are not trained. The logits of p^(0) are h e, so q is softmax((h + U(h)) e): the
twist moves the hidden state, and one product gives both. What is learned about a token carries over
to tokens with similar embeddings, so far fewer sequences are needed than for a separate output for
each token (docs/results.md). D width, H hidden units, V vocabulary.
"""

import torch
from torch import Tensor, nn

from tinystories.gpt_neo import Linear, at_least_float32
from twist.mlp import TwistMLP


class EmbeddingTwist(nn.Module):
    """log psi for hidden states; psi = 1 at first, as with `TwistMLP`."""

    def __init__(self, hidden_units: int, embeddings: Tensor, generator: torch.Generator):
        """embeddings [V, D]: the output weights of the language model."""
        super().__init__()
        self.vocab_size, self.width = embeddings.shape
        self.shift = TwistMLP(self.width, hidden_units, self.width, generator)
        self.products = Linear(self.width, self.vocab_size, bias=False, device="meta")
        weight = at_least_float32(embeddings.detach()).clone()  # [V, D]
        self.products.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """log psi of every next token [..., V] after hidden states [..., D], float32 or wider."""
        return self.products(self.shift(hidden))

    def tilted_logits(self, hidden: Tensor) -> Tensor:
        """Logits of q [..., V] after hidden states [..., D]: those of p and log psi together."""
        return self.products(at_least_float32(hidden) + self.shift(hidden))
