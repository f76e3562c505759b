"""p(s_{1:T} | s_0): a language model after a prompt s_0, for many continuations at a time.

    model = GPTNeoModel(gpt_neo, prompt, length)
    model.log_probs(tokens)              teacher forcing: log p(s_t | s_{0:t-1}) of given texts
    decoder = Decoder(model, rows)       N continuations token by token, which every sampler drives
    decoder.append(tokens, ancestors)    row n continues row ancestors[n] with tokens[n]

`Conditional` is the one interface of a language model: a GPT-Neo (`gpt_neo.py`), or any network of
`transformers` (`any_model.py`). That a text is finished is a property of p: after an `end` the
first of them follows with probability one. The hidden state of a finished text stays the one that
its end was drawn from, with a mark in a further column. Rows of equal texts share their hidden
state. N rows, S shared states, D width, V vocabulary, P tokens of a prompt, T of a text.
"""

import abc
import copy
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 16  # shared states are padded to a multiple of this, to avoid fragmentation of the heap
SHARING_PAYS = 0.875  # states are shared up to this share of distinct texts
MAX_LOGITS = 2**22  # entries of a tensor of logits, 16 MB in float32; 16 times as many on a GPU
CACHED = 2**20  # entries that stay in a processor's cache until the next operation reads them
FEWEST = 64  # rows of a slice, since each slice reads the output layer anew

End = tuple[int, ...]  # the tokens any of which finishes a text


def padded(rows: Tensor, group: int) -> Tensor:
    """rows [S] with copies of the last one behind them, up to a multiple of `group`."""
    return torch.cat([rows, rows[-1:].repeat(-len(rows) % group)])


def row_slices(rows: Tensor, per_row: int) -> Iterator[slice]:
    """Slices of the rows, equal up to one row, of at most about MAX_LOGITS / `per_row` rows."""
    most = 16 * MAX_LOGITS if rows.is_cuda else min(MAX_LOGITS, max(CACHED, FEWEST * per_row))
    count = max(1, min(len(rows), math.ceil(len(rows) * per_row / most)))
    return (slice(len(rows) * n // count, len(rows) * (n + 1) // count) for n in range(count))


def check_positions(prompt: Tensor, length: int, limit: int) -> None:
    """ValueError where the prompt [P] is empty, or has no room for `length` tokens behind it."""
    if not 0 < len(prompt) <= limit - length:
        sizes = f"the prompt has {len(prompt)} tokens and the continuation {length}"
        raise ValueError(f"{sizes}; the prompt needs at least one, and the model has {limit}")


class Decoder:
    """N continuations, without gradient: their shared hidden states and their cache."""

    @torch.no_grad()
    def __init__(self, model: "Conditional", rows: int):
        """Read the prompt once; `rows` continuations follow."""
        self.model = model
        self.cache = model.cache()
        self.shared = model.read(model.prompt[None], self.cache)[:, -1]  # [1, D]
        if model.end:
            self.shared = F.pad(self.shared, (0, 1))  # no text is finished yet
        self.index = torch.zeros(rows, dtype=torch.long, device=self.shared.device)  # [N] which one

    @property
    def hidden(self) -> Tensor:
        """The hidden state of every row [N, D]."""
        return self.shared[self.index]

    def slices(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Slices [S, D] of shared states, the rows [n] that have one of them, and which one [n]."""
        for some in row_slices(self.shared, self.model.vocab_size):
            rows = ((self.index >= some.start) & (self.index < some.stop)).nonzero()[:, 0]  # [n]
            yield self.shared[some], rows, self.index[rows] - some.start

    @torch.no_grad()
    def append(self, tokens: Tensor, ancestors: Tensor | None = None) -> None:
        """Row n becomes row ancestors[n] (itself where None) followed by tokens[n]; both [N]."""
        parents = self.index if ancestors is None else self.index[ancestors]  # [N]
        pairs = parents * self.model.vocab_size + tokens  # [N]
        pairs, index = pairs.unique(return_inverse=True)  # [S], [N]; equal rows share
        pairs = padded(pairs, GROUP)
        if len(pairs) <= SHARING_PAYS * len(tokens):
            parents = pairs // self.model.vocab_size  # [S]
            tokens = pairs % self.model.vocab_size  # [S]
        else:  # a state for each row
            index = torch.arange(len(tokens), device=tokens.device)
        self.index = index
        if not torch.equal(parents, torch.arange(len(self.shared), device=parents.device)):
            self.cache.reorder_cache(parents)
        hidden = self.model.read(tokens[:, None], self.cache)[:, 0]  # [S, D]
        if self.model.end:
            before = self.shared[parents]  # [S, D + 1]
            is_finished = (before[:, -1] > 0) | self.model.is_end(tokens)  # [S]
            hidden = torch.where(is_finished[:, None], before[:, :-1], hidden)
            hidden = torch.cat([hidden, is_finished[:, None].to(hidden.dtype)], 1)
        self.shared = hidden


class Conditional(abc.ABC):
    """A language model conditioned on one prompt."""

    network: Any  # what is fine-tuned

    def __init__(self, prompt: Tensor, length: int, width: int, vocab_size: int, end: End = ()):
        """prompt [P], then T = length tokens below vocab_size; any of `end` finishes a text."""
        self.prompt = prompt
        self.length = length
        self.width = width  # D, without the mark of a finished text
        self.vocab_size = vocab_size
        self.end = end

    def with_network(self, network: Any) -> Self:
        """The same prompt, length and end with another network."""
        model = copy.copy(self)
        model.network = network
        return model

    @abc.abstractmethod
    def cache(self) -> Any:
        """An empty cache of keys and values, with a method `reorder_cache`."""

    @abc.abstractmethod
    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """States [N, T, D] of tokens ids [N, T] behind what the cache holds; it then holds them."""

    @abc.abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], float32 or wider, of states [..., D] without a mark."""

    def is_end(self, tokens: Tensor) -> Tensor:
        """Which of the tokens finish a text, a truth value for each."""
        return torch.isin(tokens, torch.tensor(self.end, device=tokens.device))

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., D], of finished texts as well."""
        if not self.end:
            return self.logits(hidden)
        logits = self.logits(hidden[..., :-1])
        certain = logits.new_full((self.vocab_size,), -torch.inf)
        certain[self.end[0]] = 0.0
        return torch.where(hidden[..., -1:] > 0, certain, logits)

    def states(self, tokens: Tensor) -> Tensor:
        """The states [N, T, D] that the network predicts each of tokens [N, T] from."""
        cache = self.cache()
        hidden = self.read(self.prompt[None], cache)[:, -1:].expand(len(tokens), -1, -1)
        if tokens.shape[1] == 1:
            return hidden
        cache.reorder_cache(torch.zeros_like(tokens[:, 0]))  # every row continues the prompt
        return torch.cat([hidden, self.read(tokens[:, :-1], cache)], 1)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The hidden states [N, T, D] that predict each of tokens [N, T]."""
        hidden = self.states(tokens)
        if not self.end:
            return hidden
        is_end = self.is_end(tokens)  # [N, T]
        is_finished = is_end.cumsum(1) > is_end.long()  # [N, T] whether an end comes before
        # Every t is predicted by the state of t, or of the end that comes before it.
        last = (~is_finished).sum(1, keepdim=True) - 1  # [N, 1]
        t = torch.minimum(torch.arange(tokens.shape[1], device=tokens.device), last)  # [N, T]
        hidden = hidden.gather(1, t[..., None].expand_as(hidden))
        return torch.cat([hidden, is_finished[..., None].to(hidden.dtype)], 2)

    def log_probs(self, tokens: Tensor) -> Tensor:
        """log p(s_t | s_{0:t-1}) [N, T] (eq. 1) of tokens [N, T]; 0 behind the end of a text."""
        logits = self.head(self.hidden(tokens))  # [N, T, V]
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")  # [N T]
        return -losses.view(tokens.shape)
