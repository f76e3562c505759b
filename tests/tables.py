"""Tables in the place of networks, for worlds that can be enumerated (`exact.py`).

    p(v | s_{1:t-1}) = softmax(logits[n])_v,   log psi(s_{1:t-1}, v) = log_psi[n, v]

Row n belongs to prefix n, whose hidden state is that number: the empty prefix is 0, and prefix n
followed by token v is n V + 1 + v. V vocabulary, N rows, T steps.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.exact import Target
from tinystories.decoder import Conditional


class TableCache:
    prefixes: Any = None  # the number [N] of every row's prefix; None before the prompt is read

    def reorder_cache(self, parents: Tensor) -> None:
        self.prefixes = self.prefixes[parents]


class TableModel(Conditional):
    """A language model by its logits [prefixes, V]."""

    def __init__(self, table: Tensor, length: int, end: tuple[int, ...] = ()):
        super().__init__(torch.zeros(1).long(), length, 1, table.shape[1], end)
        self.table = table

    @classmethod
    def random(cls, vocab_size: int, length: int, generator: torch.Generator) -> "TableModel":
        shape = (sum(vocab_size**t for t in range(length)), vocab_size)
        return cls(torch.randn(shape, dtype=torch.float64, generator=generator), length)

    def cache(self) -> TableCache:
        return TableCache()

    def read(self, ids: Tensor, cache: TableCache) -> Tensor:
        """Numbers [N, T, 1] of the prefixes that end in each of ids [N, T]."""
        numbers = []
        for column in ids.unbind(1):
            is_prompt = cache.prefixes is None  # its one token leads to prefix 0
            number = 0 * column if is_prompt else cache.prefixes * self.vocab_size + 1 + column
            cache.prefixes = number
            numbers.append(number)
        return torch.stack(numbers, 1)[..., None].double()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]


class TableTwist(nn.Module):
    """A twist with one free parameter for every prefix and next token, log_psi [prefixes, V]."""

    def __init__(self, log_psi: Tensor):
        super().__init__()
        self.log_psi = nn.Parameter(log_psi)

    @classmethod
    def optimal(cls, target: Target) -> "TableTwist":
        levels = [level.detach().view(-1, target.tree.vocab_size) for level in target.log_psi[1:]]
        return cls(torch.cat(levels))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.log_psi[hidden[..., 0].long()]

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.log_psi[hidden[..., 0].long(), tokens]
