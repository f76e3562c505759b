"""p(s_{1:T} | s_0): a language model after a fixed prompt s_0, sampled or scored many continuations at a time.

    model = Conditional(gpt_neo, prompt)
    model.log_probs(tokens)         teacher forcing: log p(s_t | s_{0:t-1}) of given continuations
    decoder = model.decoder(rows)   N continuations token by token, which is what every sampler drives
    decoder.states    [S, D]        final hidden states of the texts so far, each once
    decoder.state_of  [N]           which of them each row stands at
    decoder.logits_of(part)         next-token logits there, of a slice of states: all of them might not fit in memory
    decoder.extend(tokens, ancestors)   row n continues row ancestors[n] with tokens[n]

Where that pays, rows whose texts are equal are computed once: all of them at first, those that chose the same words in the
next steps, and the copies that resampling makes. Extending and reordering are one call, so nothing computed for an old order
can be read in the new one. Teacher forcing computes the prompt once too. N rows, S states, B batch, D width, V vocabulary,
P prompt tokens, T continuation tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError
from tinystories.gpt_neo import GPTNeo

GROUP = 64  # states come in multiples: fewer take as long and may be rounded in another way; of more sizes, memory keeps holes
MOST = 0.875  # of the rows: when more of the texts differ, moving their histories costs more than merging saves


def merge(state_of: Tensor, tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [N] at states go on with tokens [N]: the new states' parents [S] and tokens [S], and the state of each row [N].

    Rows at one state with one token go on as one, where that pays; else each has a state of its own. The last of the merged
    states is repeated to fill a group.
    """
    pairs, pair_of = (state_of * vocab_size + tokens).unique(return_inverse=True)
    pairs = torch.cat([pairs, pairs[-1:].repeat(-len(pairs) % GROUP)])
    if len(pairs) <= MOST * len(tokens):
        return pairs // vocab_size, pairs % vocab_size, pair_of
    return state_of, tokens, torch.arange(len(tokens), device=tokens.device)


class Decoder:
    """N continuations: the states that they stand at, and the cache of what leads there."""

    def __init__(self, model: GPTNeo, prompt: Tensor, rows: int, length: int):
        """Read prompt [P] once; `rows` continuations of up to `length` tokens follow."""
        cache = model.new_cache()
        self.states = model.hidden(prompt[None], cache)[:, -1]  # [1, D]
        self.state_of = torch.zeros(rows, dtype=torch.long, device=prompt.device)  # [N]
        self.model, self.vocab_size = model, model.config.vocab_size
        self.cache = cache.continued(rows, length)

    def extend(self, tokens: Tensor, ancestors: Tensor | None = None) -> None:
        """Row n becomes row ancestors[n] (itself where None) followed by tokens[n]; both [N]."""
        state_of = self.state_of if ancestors is None else self.state_of[ancestors]  # [N]
        parents, tokens, self.state_of = merge(state_of, tokens, self.vocab_size)  # [S], [S], [N]
        if not torch.equal(parents, torch.arange(len(self.states), device=parents.device)):
            self.cache.reorder(parents)
        self.states = self.model.hidden(tokens[:, None], self.cache)[:, 0]  # [S, D]

    def logits_of(self, part: slice) -> Tensor:
        """Next-token logits [n, V] of the n states in a slice."""
        return self.model.head(self.states[part])

    @property
    def hidden(self) -> Tensor:
        """The final hidden state of every row [N, D]."""
        return self.states[self.state_of]

    @property
    def logits(self) -> Tensor:
        """Next-token logits of every row [N, V]."""
        return self.logits_of(slice(None))[self.state_of]


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
