"""log q of many texts for an adapter in training, and the texts that say when to stop.

p^(0) is not trained, so its hidden states of all texts are computed once. Texts share beginnings:
each step makes the V logits of q once for the prefixes s_{1:t-1} that differ in its batch, which
are the main cost of a step.

Where few texts have nearly all the weight, a fit learns them by heart. So a share of the texts is
held out of it, and the q at which their mean of -log q is least is kept. M texts of N, T tokens, D
width, V vocabulary.
"""

import torch
from torch import Generator, Tensor, nn

from distill.finetune import Best
from distill.pooled.adapter import Adapter
from tinystories.decoder import Conditional, counted, padded, row_slices

GROUP = 256  # prefixes of a step are padded to a multiple of this, so freed blocks are reused
CHECKED = 10  # the loss of the texts held out is computed once in so many gradient steps
PATIENCE = 4  # checks without a lower loss, after which a fit ends
LEAST_HELD = 20  # texts that differ; the loss of fewer says nothing
MOST_HELD = 256  # whose loss is computed, those with the largest weights
ROWS = 64  # of them at a time, to bound the memory of logits
TILTS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # factors of the scores g that are tried


class Texts:
    """M texts, with the states of p^(0) and the beginnings that they share."""

    def __init__(self, base: Conditional, tokens: Tensor):
        """Of tokens [M, T]."""
        slices = row_slices(tokens, base.width * tokens.shape[1])
        with torch.no_grad():
            states = torch.cat([base.states(tokens[rows]) for rows in slices])
        self.tokens = tokens
        self.states = states.flatten(0, 1)  # [M T, D]
        self.prefixes = first_places(tokens)  # [M, T]
        self.is_counted = counted(tokens, base.end)  # [M, T]

    def log_q(self, adapter: Adapter, rows: Tensor) -> Tensor:
        """log q of the counted tokens [sum n_i] of texts by their rows [n]."""
        some = self.is_counted[rows]  # [n, T]
        chosen, place = self.prefixes[rows][some].unique(return_inverse=True)  # [S]
        log_q = adapter(self.states[padded(chosen, GROUP)]).log_softmax(-1)  # [S, V]
        return log_q[place, self.tokens[rows][some]]

    @torch.no_grad()
    def tilt(self, adapter: Adapter, rows: Tensor) -> None:
        """Begin at a = 1, with the scores g times that of TILTS at which texts by their rows [n]
        have the least loss, which is convex in it."""
        nn.init.ones_(adapter.shift.last.bias[adapter.base.width :])
        scores, losses = adapter.scores, []
        for tilt in TILTS:
            adapter.scores = tilt * scores
            losses.append(-self.log_q(adapter, rows).sum().item())
        adapter.scores = TILTS[losses.index(min(losses))] * scores

    @torch.no_grad()
    def mean_loss(self, adapter: Adapter, weights: Tensor) -> float:
        """The mean of -log q of all texts by their weights [M]."""
        total = 0.0
        for rows in torch.arange(len(weights), device=weights.device).split(ROWS):
            each = weights[rows, None].expand_as(self.is_counted[rows])[self.is_counted[rows]]
            total -= (each * self.log_q(adapter, rows)).sum().item()
        return total / weights.sum().item()


class HeldOut:
    """Texts that no step of a fit learns from, and the adapter that was best for them."""

    def __init__(
        self, base: Conditional, tokens: Tensor, weights: Tensor, share: float, generator: Generator
    ):
        """A random `share` of the texts [N, T] that differ and have a weight [N]; none where they
        are too few. The loss is that of the heaviest."""
        texts, number = tokens.unique(dim=0, return_inverse=True)  # [S, T], [N]
        weight = weights.new_zeros(len(texts)).index_add(0, number, weights)  # [S], copies together
        chance = torch.rand(len(texts), device=tokens.device, generator=generator)  # [S]
        is_held = (chance < share) & (weight > 0)  # [S]
        is_held &= LEAST_HELD <= is_held.sum() < (weight > 0).sum()
        self.is_held = is_held[number]  # [N]
        heavy = (weight * is_held).topk(min(MOST_HELD, int(is_held.sum()))).indices  # [M]
        self.weights = weight[heavy]  # [M]
        self.texts = Texts(base, texts[heavy]) if len(heavy) else None
        self.best = Best(PATIENCE)

    def is_over(self, adapter: Adapter, step: int, steps: int) -> bool:
        """Whether the fit has passed its best, as the texts held out tell after a step of many."""
        if self.texts is None or (step % CHECKED > 0 and step < steps):
            return False
        self.best.note(adapter.shift, self.texts.mean_loss(adapter, self.weights))
        return self.best.is_over()


def first_places(tokens: Tensor) -> Tensor:
    """For each s_{1:t-1} of tokens [M, T], its first place [M, T] in tokens.flatten()."""
    rows, length = tokens.shape
    number = torch.zeros_like(tokens[:, 0])  # [M] of the prefix among those that differ
    places = []
    for t in range(length):
        first = torch.full_like(number, rows).scatter_reduce(
            0, number, torch.arange(rows, device=tokens.device), "amin"
        )
        places.append(first[number] * length + t)
        # A prefix is its parent's number and its last token; numbered anew, it stays small.
        pairs = number * (tokens.max() + 1) + tokens[:, t]
        number = pairs.unique(return_inverse=True)[1]
    return torch.stack(places, 1)
