"""p(s_{1:T} | s_0): a language model after a prompt s_0, for many continuations at a time.

    model = GPTNeoModel(gpt_neo, prompt, length)
    model.log_probs(tokens)              teacher forcing: log p(s_t | s_{0:t-1}) of given texts
    decoder = model.decoder(rows)        N continuations token by token, which every sampler drives
    decoder.append(tokens, ancestors)    row n continues row ancestors[n] with tokens[n]

`Conditional` is the one interface of a language model. Each kind says how tokens are read (`cache`,
`read`) and how states become logits (`head`): a GPT-Neo (`gpt_neo.py`), a network of `transformers`
(`any_model.py`), a table (`tsmc/exact.py`), p^(0) with an adapter (`distill/pooled/adapter.py`).

Rows whose texts are equal share their hidden state: all rows at first, those that chose the same
words in the next steps, and the copies that resampling makes. What a finished text has behind its
end is certain: log p is 0 there, and `counted` says where it is not. Losses of a model leave it
out; that of a twist counts log psi of the end at every later t, as in eq. 5.
N rows, S distinct states, D width, V vocabulary, P prompt tokens, T continuation tokens.
"""

import abc
import copy
import functools
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 16  # states are padded to a multiple of this, to avoid fragmentation of the heap
NO_END = -1  # in place of the token that finishes a text: texts have T tokens
SHARING_PAYS = 0.875  # states are shared up to this share of distinct texts
MAX_LOGITS = 2**22  # entries of one tensor of logits: 16 MB in float32, of which a few are alive
ON_GPU = 16  # times as many on a GPU
CACHED = 2**20  # entries that stay in a processor's cache until the next operation reads them
FEWEST = 64  # rows of a slice, since each slice reads the output layer anew
End = int | tuple[int, ...]
"""The token that finishes a text, or several of which any does."""


def padded(rows: Tensor, group: int) -> Tensor:
    """rows [S] with copies of the last one behind them, up to a multiple of `group`."""
    return torch.cat([rows, rows[-1:].repeat(-len(rows) % group)])


def row_slices(rows: Tensor, per_row: int) -> Iterator[slice]:
    """Slices of the rows, at least one; of `per_row` numbers each, they have at most MAX_LOGITS."""
    size = max(1, MAX_LOGITS * (ON_GPU if rows.is_cuda else 1) // per_row)
    if not rows.is_cuda:
        size = min(size, max(FEWEST, CACHED // per_row))
    starts = range(0, max(1, len(rows)), size)
    return (slice(start, min(len(rows), start + size)) for start in starts)


@functools.cache  # a GPU would wait for them at every token
def end_tokens(end: End, device: torch.device) -> Tensor:
    return torch.tensor(end, device=device)


def is_end(tokens: Tensor, end: End) -> Tensor:
    """Which of the tokens finish a text, a truth value for each."""
    return torch.isin(tokens, end_tokens(end, tokens.device))


def counted(tokens: Tensor, end: End) -> Tensor:
    """Which of tokens [N, T] belong to a text: those up to and including the first end."""
    ends = is_end(tokens, end)  # [N, T]
    return ends.cumsum(1) - ends.long() == 0  # no end before this token


def check_positions(prompt: Tensor, length: int, limit: int) -> None:
    """ValueError where the prompt [P] or the length is empty, or where both exceed the limit."""
    if prompt.numel() == 0:
        raise ValueError("the prompt is empty; give at least one word")
    if length < 1:
        raise ValueError(f"the length is {length}; give a number of tokens, at least 1")
    if prompt.numel() + length > limit:
        sizes = f"the prompt ({prompt.numel()} tokens) and the length ({length})"
        raise ValueError(f"{sizes} exceed the model's {limit} positions; shorten one of them")


class Decoder:
    """N continuations, without gradient: their distinct hidden states and their cache."""

    @torch.no_grad()
    def __init__(self, model: "Conditional", rows: int):
        """Read the prompt once; `rows` continuations follow."""
        self.model = model
        self.cache = model.cache()
        self.states = model.read(model.prompt[None], self.cache)[:, -1]  # [1, D]
        self.state_of = torch.zeros(rows, dtype=torch.long, device=self.states.device)  # [N]

    @property
    def hidden(self) -> Tensor:
        """The final hidden state of every row [N, D]."""
        return self.states[self.state_of]

    def distinct(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The distinct states in slices [S, D], for which V logits fit into memory, with the rows
        [n] that have one of them, and the place [n] of each row's among them."""
        for some in row_slices(self.states, self.model.vocab_size):
            is_here = (self.state_of >= some.start) & (self.state_of < some.stop)  # [N]
            rows = is_here.nonzero().squeeze(1)  # [n]
            yield self.states[some], rows, self.state_of[rows] - some.start

    @torch.no_grad()
    def append(self, tokens: Tensor, ancestors: Tensor | None = None) -> None:
        """Row n becomes row ancestors[n] (itself where None) followed by tokens[n]; both [N]."""
        parents = self.state_of if ancestors is None else self.state_of[ancestors]  # [N]
        pairs = parents * self.model.vocab_size + tokens  # [N]
        pairs, state_of = pairs.unique(return_inverse=True)  # [S], [N]; equal rows share
        pairs = padded(pairs, GROUP)
        if len(pairs) <= SHARING_PAYS * len(tokens):
            parents = pairs // self.model.vocab_size  # [S]
            tokens = pairs % self.model.vocab_size  # [S]
        else:  # a state for each row
            state_of = torch.arange(len(tokens), device=tokens.device)
        self.state_of = state_of
        if not torch.equal(parents, torch.arange(len(self.states), device=parents.device)):
            self.cache.reorder_cache(parents)
        self.states = self.model.read(tokens[:, None], self.cache)[:, 0]  # [S, D]


class Conditional(abc.ABC):
    """A language model conditioned on one prompt."""

    network: Any  # what is fine-tuned, where the model has one
    embeddings: Tensor | None = None  # the output embeddings [V, D], where it has some

    def __init__(self, prompt: Tensor, length: int, width: int, vocab_size: int, end: End = NO_END):
        """prompt [P], then `length` tokens below vocab_size, from states of D = width numbers.

        A text is finished once it has an `end`: the same token follows with probability one.
        """
        self.prompt = prompt
        self.length = length
        self.width = width
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
    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], float32 or wider, of hidden states [..., D]."""

    def states(self, tokens: Tensor) -> Tensor:
        """The hidden states [N, T, D] that predict each of tokens [N, T]."""
        cache = self.cache()
        first = self.read(self.prompt[None], cache)[:, -1:].expand(len(tokens), -1, -1)  # [N, 1, D]
        if tokens.shape[1] == 1:
            return first
        cache.reorder_cache(torch.zeros_like(tokens[:, 0]))  # every row continues the prompt
        return torch.cat([first, self.read(tokens[:, :-1], cache)], 1)

    def log_probs(self, tokens: Tensor) -> Tensor:
        """log p(s_t | s_{0:t-1}) [N, T] (eq. 1) of tokens [N, T]; 0 behind the end of a text."""
        logits = self.head(self.states(tokens))  # [N, T, V]
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")  # [N T]
        return (-losses.view(tokens.shape)).where(counted(tokens, self.end), 0.0)

    def decoder(self, rows: int) -> Decoder:
        """`rows` continuations, to be written token by token."""
        return Decoder(self, rows)
