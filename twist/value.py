"""The value of a prefix, and the twist that is made of it.

    log psi(s_{1:t}) = V(s_{1:t-1})                            where p^(m) itself is the proposal
    log psi(s_{1:t}) = V(s_{1:t-1}) + log q_t - log p          where an adapter gives q_t (m = 0)

V = MLP(h_{t-1}, z_{t-1}) is one number for each prefix. It changes no proposal, but it decides
which particles survive when they are resampled before the last token. The best V is the log of what
phi^(m) will be on average, V*(s_{1:t}) = log E_{p^(m)}[phi^(m)(s_{1:T}) | s_{1:t}], up to a
constant for each t.

V is learned by CTL (eq. 5, eq. 6), with q_t fixed:

    -grad L = sum_t { E_sigma[grad V(s_{1:t-1})] - E_{pi_t}[grad V(s_{1:t-1})] }
    positive   rows of the pool, by their truncated weights
    negative   rows of one round, by p^(m)(s_{1:t-1}) exp V(s_{1:t-1}) / q_r(s_{1:t-1})

The negative weights contain neither phi nor new draws, because the pool keeps q_r of every prefix.
pi_t sums to the formula above over s_t, whatever q_t is. N rows, T tokens, D width of the states, V
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tsmc.interfaces import LanguageModel, Report, ignore, row_slices
from tsmc.resampling import effective_sample_size, normalise
from twist.adapter import Adapter
from twist.ctl import descend
from twist.mlp import TwistMLP
from twist.pool import Pool, hidden_states


class ValueTwist(nn.Module):
    """log psi of every next token: V, the same for all of them, and any adapter's log q_t - log p.

    V = 0 until it is learned.
    """

    def __init__(
        self,
        width: int,
        hidden_units: int,
        vocab_size: int,
        generator: torch.Generator,
        memory: Tensor | None = None,
        adapter: Adapter | None = None,
    ):
        """`width` is that of the states of p^(0) without z; `memory` are the scores g [V] of z."""
        super().__init__()
        self.width = width
        self.vocab_size = vocab_size
        self.register_buffer("memory", memory)
        self.network = TwistMLP(width + (memory is not None), hidden_units, 1, generator)
        self.adapter = adapter

    def value(self, hidden: Tensor) -> Tensor:
        """V [...] of the prefixes that end in states [..., D]."""
        return self.network(hidden).squeeze(-1)

    def forward(self, hidden: Tensor) -> Tensor:
        """log psi of every next token [..., V] after states [..., D], float32 or wider."""
        value = self.value(hidden)[..., None]  # [..., 1]
        if self.adapter is None:
            return value.expand(*value.shape[:-1], self.vocab_size)
        return value + self.adapter.log_ratio(hidden)


@dataclass
class Batch:
    """What one update of V learns from."""

    positive: Tensor  # [n, T, D] states of rows drawn by their weights
    negative: Tensor  # [n, T, D] states of rows of one round
    log_ratio: Tensor  # [n, T] log p^(m)(s_{1:t-1}) - log q_r(s_{1:t-1}) of the negative rows


def batches_of_values(
    model: LanguageModel,
    pool: Pool,
    weights: Tensor,
    negatives: int,
    batch_size: int,
    updates: int,
    generator: torch.Generator,
) -> Callable[[int], Batch]:
    """The batches of all updates: positive rows by `weights` [N], negative rows of each round.

    Every distinct row passes the model once; of a round, at most `negatives` rows.
    """
    device = weights.device
    count = updates * batch_size
    drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
    distinct, place = drawn.unique(return_inverse=True)
    positive = hidden_states(model, pool.tokens()[distinct])
    rounds = []
    for one in pool.rounds:
        rows = torch.randperm(len(one.tokens), generator=generator, device=device)[:negatives]
        hidden, log_p = prefixes(model, one.tokens[rows])
        before = (log_p - one.log_q[rows, :-1]).cumsum(1)  # [n, T - 1]
        rounds.append((hidden, F.pad(before, (1, 0))))

    def draw_batch(update: int) -> Batch:
        rows = place[update * batch_size : (update + 1) * batch_size]
        hidden, log_ratio = rounds[update % len(rounds)]
        size = (batch_size,)
        others = torch.randint(len(hidden), size, generator=generator, device=device)
        return Batch(positive[rows], hidden[others], log_ratio[others])

    return draw_batch


@torch.no_grad()
def prefixes(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """States [N, T, D] that predict sequences [N, T], and log p [N, T - 1] of all but s_T."""
    slices = row_slices(len(tokens), model.vocab_size * tokens.shape[1])
    states, log_probs = [], []
    for rows in slices:
        log_p, _, hidden = model.log_probs(tokens[rows])
        states.append(hidden)
        log_probs.append(log_p[:, :-1])
    return torch.cat(states), torch.cat(log_probs)


def value_loss(twist: ValueTwist, batch: Batch) -> tuple[Tensor, dict[str, float | Tensor]]:
    """A scalar whose gradient is that of the CTL loss; its value, and the negative weights' ESS."""
    value = twist.value(batch.negative)  # [n, T]
    log_weights = batch.log_ratio + value.detach()  # [n, T]
    negative = (normalise(log_weights.T).T * value).sum()
    loss = negative - twist.value(batch.positive).mean(0).sum()
    ess = effective_sample_size(log_weights.T).mean()  # over the steps
    return loss, {"loss": loss.item(), "ess": ess.item()}


def learn_value(
    twist: ValueTwist,
    optimizer: torch.optim.Optimizer,
    draw_batch: Callable[[int], Batch],
    updates: int,
    report: Report = ignore,
) -> None:
    """Train V in place; reports the loss and the ESS of the negative weights."""
    descend(lambda update: value_loss(twist, draw_batch(update)), optimizer, updates, report)
