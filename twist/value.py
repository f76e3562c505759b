"""The value of a prefix, and the twist that is made of it.

    log psi^(m)(s_{1:t}) = V(s_{1:t-1})                                      m >= 1
    log psi^(0)(s_{1:t}) = V(s_{1:t-1}) + sum_{u <= t} (log q_u - log p_u)   q_u from an adapter

V = MLP(h_{t-1}, z_{t-1}) is one number for each prefix. It changes no proposal, but it decides
which particles survive when they are resampled before the last token. Because p^(0) psi^(0) = q exp
V, the sampler runs in every generation with the language model that proposes and with exp V; below,
p^(m) stands for q in generation 0 too. The best V is the log of what phi^(m) will be on average,
V*(s_{1:t}) = log E_{p^(m)}[phi^(m)(s_{1:T}) | s_{1:t}], up to a constant for each t.

V is learned by CTL; the gradient of this loss is eq. 6, and V = 0 has loss 0:

    loss = sum_t { log E_{p^(m)}[exp V(s_{1:t-1})] - E_sigma[V(s_{1:t-1})] }
    positive   E_sigma: rows of the pool, by their truncated weights
    negative   E_{p^(m)}: rows of one round, by p^(m)(s_{1:t-1}) / q_r(s_{1:t-1})

The negative weights contain neither phi nor new draws, because the pool keeps q_r of every prefix.
A fifth of the pool is held out. Of the values met in training, V = 0 among them, those with the
least loss there are kept. N rows, T tokens, D width of the states, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tsmc.interfaces import LanguageModel, Report, ignore, row_slices
from tsmc.resampling import effective_sample_size
from twist.adapter import Adapter
from twist.ctl import descend
from twist.mlp import TwistMLP
from twist.pool import Pool, hidden_states

HELD_OUT = 0.2  # share of the pool
CHECK = 20  # updates between two looks at the rows held out


class ValueTwist(nn.Module):
    """log psi of every next token: V, the same for all of them; V = 0 until it is learned."""

    def __init__(
        self,
        width: int,
        hidden_units: int,
        vocab_size: int,
        generator: torch.Generator,
        memory: Tensor | None = None,
        adapter: Adapter | None = None,
    ):
        """`width` without z, whose scores g [V] are `memory`; `adapter` proposes for m = 0."""
        super().__init__()
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
        return value.expand(*value.shape[:-1], self.vocab_size)


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
) -> tuple[Callable[[int], Batch], list[Batch]]:
    """The batches of all updates, and for each round one of rows that are held out.

    Positive rows are drawn by `weights` [N], where none on their side has a weight by all; of a
    round, at most `negatives` rows are used. Every distinct row passes the model once.
    """
    device = weights.device
    tokens = pool.tokens()
    is_held_out = torch.rand(len(weights), generator=generator, device=device) < HELD_OUT

    def draw_positive(is_allowed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """States [n, T, D] of distinct rows, and which of them each draw is [count]."""
        allowed = weights.where(is_allowed, 0.0)
        if not allowed.any():
            allowed = weights
        drawn = torch.multinomial(allowed, count, replacement=True, generator=generator)
        distinct, place = drawn.unique(return_inverse=True)
        return hidden_states(model, tokens[distinct]), place

    positive, place = draw_positive(~is_held_out, updates * batch_size)
    states, its_place = draw_positive(is_held_out, negatives)
    held = states[its_place]  # [n, T, D]
    rounds, held_out = [], []
    for one in pool.rounds:
        rows = torch.randperm(len(one.tokens), generator=generator, device=device)[:negatives]
        hidden, log_p = prefixes(model, one.tokens[rows])
        log_ratio = F.pad((log_p - one.log_q[rows, :-1]).cumsum(1), (1, 0))  # [n, T]
        cut = max(1, int(HELD_OUT * len(rows)))
        held_out.append(Batch(held, hidden[:cut], log_ratio[:cut]))
        rest = slice(cut if len(rows) > cut else 0, None)
        rounds.append((hidden[rest], log_ratio[rest]))

    def draw_batch(update: int) -> Batch:
        rows = place[update * batch_size : (update + 1) * batch_size]
        hidden, log_ratio = rounds[update % len(rounds)]
        others = torch.randint(len(hidden), rows.shape, generator=generator, device=device)
        return Batch(positive[rows], hidden[others], log_ratio[others])

    return draw_batch, held_out


@torch.no_grad()
def prefixes(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """States [N, T, D] that predict sequences [N, T], and log p [N, T - 1] of all but s_T."""
    states, log_probs = [], []
    for rows in row_slices(len(tokens), model.vocab_size * tokens.shape[1]):
        log_p, _, hidden = model.log_probs(tokens[rows])
        states.append(hidden)
        log_probs.append(log_p[:, :-1])
    return torch.cat(states), torch.cat(log_probs)


def value_loss(twist: ValueTwist, batch: Batch) -> tuple[Tensor, dict[str, float | Tensor]]:
    """The loss, zero for V = 0, with the figures to report: its value and the negatives' ESS."""
    log_weights = batch.log_ratio + twist.value(batch.negative)  # [n, T]
    negative = log_weights.logsumexp(0) - batch.log_ratio.logsumexp(0)  # [T]
    loss = (negative - twist.value(batch.positive).mean(0)).sum()
    ess = effective_sample_size(log_weights.detach().T).mean()  # over the steps
    return loss, {"loss": loss.item(), "ess": ess.item()}


def learn_value(
    twist: ValueTwist,
    optimizer: torch.optim.Optimizer,
    draw_batch: Callable[[int], Batch],
    held_out: list[Batch],
    updates: int,
    report: Report = ignore,
) -> None:
    """Train V in place; of the values met, those with the least loss on `held_out` are kept."""
    least, best = 0.0, copy.deepcopy(twist.state_dict())  # V = 0

    def look() -> None:
        nonlocal least, best
        with torch.no_grad():
            mean = sum(value_loss(twist, batch)[1]["loss"] for batch in held_out) / len(held_out)
        if mean < least:
            least, best = mean, copy.deepcopy(twist.state_dict())

    def loss(update: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        if update % CHECK == 0:
            look()
        return value_loss(twist, draw_batch(update))

    descend(loss, optimizer, updates, report)
    look()
    twist.load_state_dict(best)
