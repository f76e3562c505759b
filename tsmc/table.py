"""Tables in place of networks, for worlds small enough to be enumerated, in float64.

    p(v | s_{1:t-1}) = softmax(logits[n])_v,   log psi(s_{1:t-1}, v) = log_psi[n, v]

Row n of a table belongs to prefix n: the empty prefix is 0, and prefix n followed by token v is
n V + 1 + v. `hidden` is that number. N rows, T steps, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tinystories.errors import InputError


def count_prefixes(vocab_size: int, length: int) -> int:
    """How many prefixes are shorter than `length` tokens."""
    return sum(vocab_size**t for t in range(length))


class TableDecoder:
    """N continuations in a table."""

    def __init__(self, vocab_size: int, rows: int, device: torch.device):
        self.vocab_size = vocab_size
        self.prefixes = torch.zeros(rows, dtype=torch.long, device=device)  # [N]

    @property
    def hidden(self) -> Tensor:
        """The number of every row's prefix [N, 1]."""
        return self.prefixes[:, None].double()

    def evaluate(self, network: Callable[[Tensor], Tensor], rows: slice) -> Tensor:
        """network(hidden [n, 1]) of the n rows in a slice."""
        return network(self.hidden[rows])

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None:
        """Row n becomes row ancestors[n] (itself where None) followed by tokens[n]; both [N]."""
        prefixes = self.prefixes if ancestors is None else self.prefixes[ancestors]
        self.prefixes = prefixes * self.vocab_size + 1 + tokens


class TableModel(nn.Module):
    """A language model of fixed length given by its logits [prefixes, V], which are parameters."""

    def __init__(self, logits: Tensor, length: int):
        super().__init__()
        shape = list(logits.shape)
        needed = [count_prefixes(shape[1], length), shape[1]]
        if length < 1 or shape != needed:
            raise InputError(f"the table has shape {shape}; length {length} needs {needed}")
        self.table = nn.Parameter(logits)
        self.length = length
        self.vocab_size = shape[1]

    @classmethod
    def random(
        cls, vocab_size: int, length: int, generator: torch.Generator, scale: float = 1.0
    ) -> "TableModel":
        """Normal logits of standard deviation `scale`, in float64."""
        shape = (count_prefixes(vocab_size, length), vocab_size)
        return cls(scale * torch.randn(shape, dtype=torch.float64, generator=generator), length)

    def decoder(self, rows: int) -> TableDecoder:
        """A fresh decoder of `rows` continuations."""
        return TableDecoder(self.vocab_size, rows, self.table.device)

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] after hidden [..., 1]."""
        return self.table[hidden.squeeze(-1).long()]

    def states(self, tokens: Tensor) -> Tensor:
        """hidden [N, T, 1] that predicts each of tokens [N, T], T up to the length."""
        numbers = [torch.zeros_like(tokens[:, 0])]
        for t in range(tokens.shape[1] - 1):
            numbers.append(numbers[-1] * self.vocab_size + 1 + tokens[:, t])
        return torch.stack(numbers, 1)[..., None].double()

    def log_probs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p(s_t | s_{0:t-1}) [N, T], logits [N, T, V] and hidden [N, T, 1] of tokens [N, T]."""
        hidden = self.states(tokens)  # [N, T, 1]
        logits = self.head(hidden)  # [N, T, V]
        log_p = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)  # [N, T]
        return log_p, logits, hidden


class TableTwist(nn.Module):
    """A twist with one free parameter for every prefix and next token, log_psi [prefixes, V]."""

    def __init__(self, log_psi: Tensor):
        super().__init__()
        self.log_psi = nn.Parameter(log_psi)

    @classmethod
    def ones(cls, model: TableModel) -> "TableTwist":
        """psi = 1, with which the proposal is the model itself."""
        return cls(torch.zeros_like(model.table))

    def forward(self, hidden: Tensor) -> Tensor:
        """log psi of every next token [..., V] after hidden [..., 1]."""
        return self.log_psi[hidden.squeeze(-1).long()]

    def of_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """log psi of tokens [...] after hidden [..., 1]."""
        return self.log_psi[hidden.squeeze(-1).long(), tokens]
