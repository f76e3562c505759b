"""p(s_{1:T} | s_0): a language model after a prompt s_0, for many continuations at a time.

    model = Conditional(gpt_neo, prompt, length)
    model.log_probs(tokens)              teacher forcing: log p(s_t | s_{0:t-1}) of given texts
    decoder = model.decoder(rows)        N continuations token by token, which every sampler drives
    decoder.extend(tokens, ancestors)    row n continues row ancestors[n] with tokens[n]

Rows whose texts are equal share their hidden state: all rows at first, those that chose the same
words in the next steps, and the copies that resampling makes. What a finished text has behind its
end is certain: log p is 0 there, `counted` says where it is not, and every loss leaves it out.
N rows, S distinct states, D width, V vocabulary, P prompt tokens, T continuation tokens.
"""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo, KeyValueCache

GROUP = 16  # states are padded to a multiple of this, to avoid fragmentation of the heap
NO_END = -1  # in place of the token that finishes a text: texts have T tokens
SHARING_PAYS = 0.875  # up to this share of distinct texts; above, it costs more than it saves


def padded(rows: Tensor, group: int) -> Tensor:
    """rows [S] with copies of the last one behind them, up to a multiple of `group`."""
    return torch.cat([rows, rows[-1:].repeat(-len(rows) % group)])


def counted(tokens: Tensor, end: int) -> Tensor:
    """Which of tokens [N, T] belong to a text: those up to and including the first `end`."""
    ended = (tokens == end).cumsum(1)  # [N, T] how often the text has ended, this token included
    return ended - (tokens == end).long() == 0


def check_positions(prompt: Tensor, length: int, limit: int) -> None:
    """InputError where the prompt [P] or the length is empty, or where both exceed the limit."""
    if prompt.numel() == 0:
        raise InputError("the prompt is empty; give at least one word")
    if length < 1:
        raise InputError(f"the length is {length}; give a number of tokens, at least 1")
    if prompt.numel() + length > limit:
        sizes = f"the prompt ({prompt.numel()} tokens) and the length ({length})"
        raise InputError(f"{sizes} exceed the model's {limit} positions; shorten one of them")


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

    def evaluate(self, network: Callable[[Tensor], Tensor], rows: slice = slice(None)) -> Tensor:
        """network(hidden [n, D]) of the n rows in a slice, computed once for equal texts."""
        if len(self.states) == len(self.state_of):
            return network(self.states[rows])
        state_of = self.state_of[rows]  # [n]
        if len(self.states) <= len(state_of):
            return network(self.states).index_select(0, state_of)  # faster than indexing
        states, place = state_of.unique(return_inverse=True)
        return network(self.states[states]).index_select(0, place)

    @torch.no_grad()
    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None:
        """Row n becomes row ancestors[n] (itself where None) followed by tokens[n]; both [N]."""
        parents = self.state_of if ancestors is None else self.state_of[ancestors]  # [N]
        pairs = parents * self.model.vocab_size + tokens  # [N]
        pairs, pair_of = pairs.unique(return_inverse=True)  # [S], [N]; equal rows share
        pairs = padded(pairs, GROUP)
        if len(pairs) <= SHARING_PAYS * len(tokens):
            parents = pairs // self.model.vocab_size  # [S]
            tokens = pairs % self.model.vocab_size  # [S]
            self.state_of = pair_of
        else:
            self.state_of = torch.arange(len(tokens), device=tokens.device)
        if not torch.equal(parents, torch.arange(len(self.states), device=parents.device)):
            self.cache.reorder_cache(parents)
        self.states = self.model.read(tokens[:, None], self.cache)[:, 0]  # [S, D]


class Autoregressive(Protocol):
    """A language model whose logits are made of states."""

    end: int  # the token that finishes a text and then repeats itself; NO_END: there is none

    def head(self, hidden: Tensor) -> Tensor: ...  # [..., D] -> logits [..., V]
    def states(self, tokens: Tensor) -> Tensor: ...  # [N, T] -> hidden [N, T, D]

    def log_probs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p(s_t | s_{0:t-1}) [N, T] (eq. 1), logits [N, T, V] and states of tokens [N, T]."""
        hidden = self.states(tokens)  # [N, T, D]
        logits = self.head(hidden)  # [N, T, V]
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")  # [N T]
        log_p = (-losses.view(tokens.shape)).where(counted(tokens, self.end), 0.0)
        return log_p, logits, hidden


class Conditional(Autoregressive):
    """A GPT-Neo conditioned on one prompt."""

    def __init__(self, network: GPTNeo, prompt: Tensor, length: int, end: int = NO_END):
        """prompt [P], then at most `length` tokens; InputError where they do not fit.

        A text is finished once it has the token `end`: the same token follows with probability one.
        """
        check_positions(prompt, length, network.config.max_position_embeddings)
        self.network = network
        self.prompt = prompt
        self.length = length
        self.end = end
        self.vocab_size = network.config.vocab_size

    def with_network(self, network: Any) -> Any:
        """Another network of this kind after the same prompt."""
        model = copy.copy(self)
        model.network = network
        return model

    @property
    def output_embeddings(self) -> Tensor:
        """What makes logits of hidden states [V, D]."""
        return self.network.transformer.wte.weight

    def cache(self) -> Any:
        """An empty cache of keys and values, with a method `reorder_cache`."""
        return KeyValueCache()

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """States [N, T, D] of tokens ids [N, T] behind what the cache holds; it then holds them."""
        return self.network.transformer(ids, cache)

    def decoder(self, rows: int) -> Decoder:
        """A fresh decoder of `rows` continuations."""
        return Decoder(self, rows)

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., D]."""
        return self.network.head(hidden)

    def states(self, tokens: Tensor) -> Tensor:
        """The hidden states [N, T, D] that predict each of tokens [N, T]."""
        cache = self.cache()
        first = self.read(self.prompt[None], cache)[:, -1:]  # [1, 1, D]
        others = self.read(tokens[:, :-1], cache)  # [N, T - 1, D]
        return torch.cat([first.expand(len(tokens), -1, -1), others], 1)
