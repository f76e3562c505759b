"""Exact answers by enumeration, for any language model whose V^T sequences can be listed.

    psi*(s_{1:T}) = phi(s_{1:T}),   psi*(s_{1:t}) = sum_v p(v | s_{1:t}) psi*(s_{1:t}, v)
    sigma(s_{1:t}) = p(s_{1:t}) psi*(s_{1:t}) / Z_sigma,   Z_sigma = psi*(s_{1:0})    eq. 2 and 3
    pi_t(s_{1:t}) proportional to p(s_{1:t}) psi(s_{1:t})                             eq. 4

Quantities of step t are listed over all V^t prefixes s_{1:t} in lexicographic order, so prefix i
followed by token v is entry i V + v of the next list. D width, V vocabulary, T steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tinystories.decoder import Conditional, row_slices
from tsmc.proposal import WIDEST, Twist


def all_sequences(vocab_size: int, length: int, device: torch.device | None = None) -> Tensor:
    """All sequences [V^T, T] in lexicographic order."""
    powers = vocab_size ** torch.arange(length - 1, -1, -1, device=device)  # [T]
    return torch.arange(vocab_size**length, device=device)[:, None] // powers % vocab_size


def kl_divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b), a scalar, of log probabilities [N]; infinite where b lacks what a has."""
    return torch.where(log_a > -torch.inf, log_a.exp() * (log_a - log_b), 0.0).sum()


class Tree:
    """All prefixes of a language model: conditional log probabilities and hidden states."""

    @torch.no_grad()
    def __init__(self, model: Conditional):
        """Evaluate `model` after every prefix."""
        self.vocab_size, self.length = model.vocab_size, model.length
        assert self.vocab_size**self.length <= 2**21, "too many sequences to enumerate"
        self.sequences = all_sequences(self.vocab_size, self.length, model.prompt.device)
        self.log_p: list[Tensor] = []  # T of [V^t, V], t = 0..T-1
        self.hidden: list[Tensor] = []  # T of [V^t, D]
        for t in range(1, self.length + 1):
            ends = all_sequences(self.vocab_size, t, model.prompt.device)[:: self.vocab_size]
            slices = row_slices(ends, WIDEST * model.width * t)
            # The states before the last of t tokens, which is 0 in each of these sequences.
            hidden = torch.cat([model.hidden(ends[rows])[:, -1] for rows in slices])
            self.hidden.append(hidden)  # [V^(t-1), D]
            self.log_p.append(model.head(hidden).log_softmax(-1))  # [V^(t-1), V]

    def prefix_log_q(self, twist: Twist | None = None) -> list[Tensor]:
        """log q(s_{1:t}) of every prefix: T + 1 of [V^t], t = 0..T; without a twist log p."""
        log_q = [torch.zeros_like(self.log_p[0][:, 0])]  # [1]
        for log_p, hidden in zip(self.log_p, self.hidden, strict=True):
            tilted = log_p if twist is None else log_p + twist(hidden)  # [V^t, V]
            normalised = tilted - tilted.logsumexp(-1, keepdim=True)
            steps = torch.where(tilted > -torch.inf, normalised, -torch.inf)
            log_q.append((log_q[-1][:, None] + steps).flatten())
        return log_q


class Target:
    """sigma (eq. 2) and its marginals (eq. 3), in lists over t = 0..T with [V^t] entries each."""

    def __init__(self, model: Conditional, log_phi: Callable[[Tensor], Tensor]):
        self.tree = Tree(model)
        self.log_p = self.tree.prefix_log_q()
        log_phi_all = log_phi(self.tree.sequences)  # [V^T]
        self.log_psi = [log_phi_all.to(self.log_p[0].dtype)]  # the optimal twist
        for log_p in reversed(self.tree.log_p):
            self.log_psi.insert(0, (log_p + self.log_psi[0].view_as(log_p)).logsumexp(-1))
        self.log_z = self.log_psi[0].item()
        assert -torch.inf < self.log_z < torch.inf, "phi is zero everywhere, or NaN: no sigma"
        levels = zip(self.log_p, self.log_psi, strict=True)
        self.log_sigma = [log_p + log_psi - self.log_z for log_p, log_psi in levels]
