"""p(s_{1:T} | s_0): a language model after a fixed prompt s_0, sampled or scored many continuations at a time.

    model = Conditional(gpt_neo, prompt)
    model.log_probs(tokens)         teacher forcing: log p(s_t | s_{0:t-1}) of given continuations
    decoder = model.decoder(rows)   B continuations token by token, which is what every sampler drives
    decoder.hidden    [B, D]        final hidden state at each row's last position
    decoder.logits_of(rows)         next-token logits there, of a slice of rows: all of them might not fit in memory
    decoder.extend(tokens, ancestors)   row b continues row ancestors[b] with tokens[b]

Extending and reordering are one call, so nothing computed for an old order can be read in the new one. Until the first
token all rows are equal and are computed once; teacher forcing computes the prompt once too. B rows, D width,
V vocabulary, P prompt tokens, T continuation tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo


class Decoder:
    """B continuations: the hidden state of each for the next step, the logits of it, and the cache that leads there."""

    def __init__(self, model: GPTNeo, prompt: Tensor, rows: int, length: int):
        """Prefill prompt [P] at batch 1 and share it with `rows` continuations of up to `length` tokens."""
        cache = model.new_cache()
        hidden = model.hidden(prompt[None], cache)[:, -1]  # [1, D]
        self.model, self.vocab_size = model, model.config.vocab_size
        self.cache = cache.repeat(rows, length)
        self.hidden = hidden.expand(rows, -1)  # [B, D]
        self.first_logits: Tensor | None = model.head(hidden)  # [1, V]

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None:
        """Row b becomes row ancestors[b] (itself where None) followed by tokens[b]; both [B]."""
        if ancestors is not None:
            self.cache.reorder(ancestors)
        self.hidden = self.model.hidden(tokens[:, None], self.cache)[:, 0]  # [B, D]
        self.first_logits = None

    def logits_of(self, rows: slice) -> Tensor:
        """Next-token logits [n, V] of the n rows in a slice."""
        hidden = self.hidden[rows]
        return self.model.head(hidden) if self.first_logits is None else self.first_logits.expand(len(hidden), -1)

    @property
    def logits(self) -> Tensor:
        """Next-token logits of all rows [B, V]."""
        return self.logits_of(slice(None))


class Conditional:
    """A GPT-Neo conditioned on one prompt."""

    def __init__(self, model: GPTNeo, prompt: Tensor, length: int):
        """prompt [P], continuations of at most `length` tokens; InputError where the two do not fit the model."""
        limit = model.config.max_position_embeddings
        if prompt.numel() == 0:
            raise InputError("the prompt is empty; give at least one word")
        if prompt.numel() + length > limit:
            sizes = f"the prompt ({prompt.numel()} tokens) and the length ({length})"
            raise InputError(f"{sizes} exceed the model's {limit} positions; shorten one of them")
        self.model, self.prompt, self.length = model, prompt, length
        self.vocab_size = model.config.vocab_size

    def decoder(self, rows: int) -> Decoder:
        """A fresh decoder of `rows` continuations."""
        return Decoder(self.model, self.prompt, rows, self.length)

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., D]."""
        return self.model.head(hidden)

    def states(self, tokens: Tensor) -> Tensor:
        """The hidden states [B, T, D] that predict each of continuations tokens [B, T], by teacher forcing."""
        cache = self.model.new_cache()
        first = self.model.hidden(self.prompt[None], cache)[:, -1:]  # [1, 1, D]
        others = self.model.hidden(tokens[:, :-1], cache)  # [B, T - 1, D]
        return torch.cat([first.expand(len(tokens), -1, -1), others], 1)

    def log_probs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Teacher forcing of continuations tokens [B, T]: the factors of p (eq. 1).

        Returns log p(s_t | s_{0:t-1}) [B, T], logits [B, T, V] and the hidden states [B, T, D] that predict each s_t.
        """
        hidden = self.states(tokens)  # [B, T, D]
        logits = self.model.head(hidden)  # [B, T, V]
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")  # [B T]
        return -losses.view(tokens.shape), logits, hidden
