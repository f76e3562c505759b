"""The twist: log psi(s_{1:t}) = MLP(h_{t-1})[s_t], a small network over the language model's final hidden state.

    h_{t-1} [.., D] -> GELU(linear) -> GELU(linear) -> linear -> log psi of every possible next token [.., V]

One forward serves the whole vocabulary, so proposing costs one language-model step and one twist step. The last layer
starts at zero: psi = 1, and the first proposal is the language model itself. The loss and the evidence do not change
when log psi_t shifts by a constant, so the output is left unclipped. D width, H hidden units, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.layers import LinearGELU, at_least_float32


class TwistMLP(nn.Module):
    """log psi (of eq. 4) for hidden states; `of_tokens` evaluates chosen tokens only, which is all that learning needs."""

    def __init__(self, width: int, hidden_units: int, vocab_size: int, generator: torch.Generator):
        super().__init__()
        self.width, self.vocab_size = width, vocab_size
        self.first = LinearGELU(width, hidden_units, device="meta")  # which draws no random numbers of its own
        self.second = LinearGELU(hidden_units, hidden_units, device="meta")
        self.last = nn.Linear(hidden_units, vocab_size, device="meta")
        device = generator.device
        for layer in (self.first, self.second, self.last):  # not by `to_empty`, which loads PyTorch's compiler
            zeros = {name: torch.zeros(value.shape, device=device) for name, value in layer.named_parameters()}
            layer.load_state_dict(zeros, assign=True)
        for layer in (self.first, self.second):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)

    def features(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., H], in the type of the weights"""
        return self.second(self.first(hidden.to(self.first.weight.dtype)))

    def forward(self, hidden: Tensor) -> Tensor:
        """log psi of every next token [..., V] after hidden states [..., D], float32 or wider."""
        return at_least_float32(self.last(self.features(hidden)))

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """log psi of tokens [...] after hidden states [..., D], without the other V - 1 outputs."""
        weight = F.embedding(tokens, self.last.weight)  # [..., H]
        products = at_least_float32(self.features(hidden)) * weight  # [..., H]
        return products.sum(-1) + self.last.bias[tokens]  # [...]
