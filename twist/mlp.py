"""The twist: log psi(s_{1:t}) = MLP(h_{t-1})[s_t], on the language model's final hidden state.

    h_{t-1} [.., D] -> GELU(linear) -> GELU(linear) -> linear -> log psi of every next token [.., V]

One forward pass serves the whole vocabulary. The last layer starts at zero: psi = 1, and the first
proposal is the language model itself. The paper leaves this form open. H hidden units, V tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinystories.gpt_neo import at_least_float32

HIDDEN_UNITS = 192


class TwistMLP(nn.Module):
    """log psi (eq. 4) of all next tokens; `of_tokens` computes that of given tokens alone."""

    def __init__(self, width: int, vocab_size: int, generator: torch.Generator):
        super().__init__()
        self.first = nn.Linear(width, HIDDEN_UNITS, device="meta")  # the meta device draws nothing
        self.second = nn.Linear(HIDDEN_UNITS, HIDDEN_UNITS, device="meta")
        self.last = nn.Linear(HIDDEN_UNITS, vocab_size, device="meta")
        self.to_empty(device=generator.device)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        for layer in (self.first, self.second):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)

    def features(self, hidden: Tensor) -> Tensor:
        """Features [..., H], without the mark of a finished text: log psi stays that of its end."""
        hidden = hidden[..., : self.first.in_features].to(self.first.weight.dtype)
        return F.gelu(self.second(F.gelu(self.first(hidden))))  # [..., H]

    def forward(self, hidden: Tensor) -> Tensor:
        """log psi of every next token [..., V] after hidden states [..., D], float32 or wider."""
        return at_least_float32(self.last(self.features(hidden)))

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """log psi of tokens [...] after hidden states [..., D], without the other V - 1 outputs."""
        weight = F.embedding(tokens, self.last.weight)  # [..., H]
        products = at_least_float32(self.features(hidden)) * weight  # [..., H]
        return products.sum(-1) + self.last.bias[tokens]  # [...]
