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
    negative   E_{p^(m)}: fresh draws of p^(m), which need no phi

A fifth of both is held out. Of the values met in training those with the least loss there are
kept, if it is below zero by two standard errors; otherwise V = 0. N rows, T tokens, D width of the
states, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tinystories.gpt_neo import GPTNeo
from tsmc.interfaces import LanguageModel, Report, ignore
from tsmc.proposal import sample_proposal
from tsmc.resampling import log_mean_exp
from twist.adapter import Adapter
from twist.ctl import descend
from twist.mlp import TwistMLP
from twist.pool import Pool, draw_rows, hidden_states

HELD_OUT = 0.2  # share of the pool and of the negatives
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

    @classmethod
    def like(cls, tensors: dict[str, Tensor], network: GPTNeo) -> "ValueTwist":
        """One of the sizes of saved tensors; memory and adapter are there if their tensors are."""
        sizes = network.config
        widths = (sizes.hidden_size, len(tensors["network.first.weight"]), sizes.vocab_size)
        memory = torch.zeros(sizes.vocab_size) if "memory" in tensors else None
        parts = {name[8:]: tensors[name] for name in tensors if name.startswith("adapter.")}
        adapter = Adapter.like(parts, network) if parts else None
        return cls(*widths, torch.Generator(), memory, adapter)

    def value(self, hidden: Tensor) -> Tensor:
        """V [...] of the prefixes that end in states [..., D]."""
        return self.network(hidden).squeeze(-1)

    def forward(self, hidden: Tensor) -> Tensor:
        """log psi of every next token [..., V] after states [..., D], float32 or wider."""
        value = self.value(hidden)[..., None]  # [..., 1]
        return value.expand(*value.shape[:-1], self.vocab_size)


@dataclass
class Batch:
    """What one update of V learns from, or what is held out."""

    positive: Tensor  # [n, T, D] states of rows of the pool
    weights: Tensor  # [n] of the positive rows, which sum to one
    negative: Tensor  # [n, T, D] states of draws of p^(m)


def batches_of_values(
    model: LanguageModel,
    pool: Pool,
    weights: Tensor,
    negatives: int,
    batch_size: int,
    updates: int,
    generator: torch.Generator,
) -> tuple[Callable[[int], Batch], Batch]:
    """The batches of all updates, and the rows that are held out.

    Positive rows are drawn by `weights` [N], each distinct row passing the model once; negative
    rows are taken from `negatives` draws of p^(m) = model.
    """
    device = weights.device
    is_held_out = torch.rand(len(weights), generator=generator, device=device) < HELD_OUT
    draws = sample_proposal(model, None, negatives, generator, keep_hidden=True)
    cut = max(1, int(HELD_OUT * negatives))
    negative = draws.hidden[cut if negatives > cut else 0 :]

    def rows_by_weight(is_allowed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        allowed = weights.where(is_allowed, 0.0)
        if not allowed.any():  # every weight is in the other part
            allowed = weights
        distinct, place = draw_rows(allowed, count, generator)
        return hidden_states(model, pool.tokens()[distinct]), place

    positive, place = rows_by_weight(~is_held_out, updates * batch_size)
    held, its_place = rows_by_weight(is_held_out, negatives)
    held_out = Batch(held, torch.bincount(its_place) / negatives, draws.hidden[:cut])
    equal = torch.full((batch_size,), 1 / batch_size, device=device)

    def draw_batch(update: int) -> Batch:
        rows = place[update * batch_size : (update + 1) * batch_size]
        size = (batch_size,)
        others = torch.randint(len(negative), size, generator=generator, device=device)
        return Batch(positive[rows], equal, negative[others])

    return draw_batch, held_out


def value_loss(twist: ValueTwist, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, zero for V = 0, and its standard error, both scalars."""
    value = twist.value(batch.negative)  # [n, T]
    negative = log_mean_exp(value.T)  # [T]
    each = negative.sum() - twist.value(batch.positive).sum(1)  # [n]
    loss = (batch.weights * each).sum()
    shares = (value - negative).exp().sum(1)  # [n] what each negative row adds to log E
    variance = (batch.weights * (each - loss)).square().sum()
    return loss, (variance + shares.var(correction=0) / len(shares)).sqrt()


def learn_value(
    twist: ValueTwist,
    optimizer: torch.optim.Optimizer,
    draw_batch: Callable[[int], Batch],
    held_out: Batch,
    updates: int,
    report: Report = ignore,
) -> None:
    """Train V in place; of the values met, those that are best on `held_out` are kept.

    Reports the loss of every step, and of what is held out the least so far.
    """
    least, best = 0.0, copy.deepcopy(twist.state_dict())  # V = 0

    def look() -> None:
        nonlocal least, best
        with torch.no_grad():
            loss, std_error = value_loss(twist, held_out)
        if loss < least and loss + 2 * std_error < 0:
            least, best = loss.item(), copy.deepcopy(twist.state_dict())

    def loss(update: int) -> tuple[Tensor, dict[str, float | Tensor]]:
        if update % CHECK == 0:
            look()
        value = value_loss(twist, draw_batch(update))[0]
        return value, {"loss": value.item(), "held_out": least}

    descend(loss, optimizer, updates, report)
    look()
    twist.load_state_dict(best)
