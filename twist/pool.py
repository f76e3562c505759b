"""A twist learned from all sequences drawn so far, each weighted by the proposal that drew it.

    w_i = p^(0)(s_i) phi(s_i) / q_r(s_i)         round r drew s_i from q_r
    W_i = min(w_i, c) / sum_j min(w_j, c)        truncated importance sampling (Ionides, 2008)
    loss = - sum_i W_i log q(s_i),  q = softmax(log p^(0) + log psi)

This is self-distillation (eq. 7) into the twist instead of into the model. For c = infinity the
loss differs from KL(sigma||q), which the table reports, by a constant; contrastive learning
(twist/ctl.py) minimises the sum over t of KL(sigma||pi_t). While proposals are poor, a few
sequences have all the weight; c is the largest value under which the ESS of W reaches a given
number.

The proposal of a round does not depend on the draws of that round, so E[w_i] = Z_sigma whatever the
earlier rounds were. The weights of a mixture of all proposals (adaptive multiple importance
sampling; Cornuet et al., 2012) vary less but are not used: a later proposal overfits the earlier
sequences and assigns them high probability, which hides how little is known.

Only q is learned, so log psi is known up to a constant for each prefix: enough for proposing, but
not for resampling before the last token. N sequences, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError
from tsmc.interfaces import LanguageModel, Report, Twist, ignore, row_slices
from tsmc.proposal import sample_proposal
from tsmc.resampling import effective_sample_size, normalise
from tsmc.sampler import Sigma
from twist.ctl import positive_log_weights
from twist.embedding import EmbeddingTwist

HALVINGS = 40  # of the interval in which log c is searched


class Pool:
    """Weighted sequences from all rounds."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []  # [N_r, T] of each round
        self.log_weights: list[Tensor] = []  # [N_r] log w

    def add(self, tokens: Tensor, log_weights: Tensor) -> None:
        """Add a round: sequences [N_r, T] and log w [N_r]; InputError for NaN and infinity."""
        if not bool((log_weights < torch.inf).all()):
            raise InputError("twist learning: a weight is NaN or infinite; check the potential")
        self.tokens.append(tokens)
        self.log_weights.append(log_weights)

    def weights(self, least_ess: float) -> Tensor:
        """W [N] for the largest c with which their ESS is at least least_ess * N, if there is one.

        InputError where no sequence has a weight.
        """
        log_weights = torch.cat(self.log_weights)
        alive = log_weights[log_weights > -torch.inf]
        if not len(alive):
            fault = f"none of the {len(log_weights)} sequences drawn has phi > 0"
            raise InputError(f"{fault}; draw more, or soften the potential")
        low = alive.min()
        high = alive.max()
        if effective_sample_size(log_weights) < least_ess * len(log_weights):
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                ess = effective_sample_size(log_weights.clamp(max=middle))
                if ess >= least_ess * len(log_weights):
                    low = middle
                else:
                    high = middle
            high = low
        return normalise(log_weights.clamp(max=high))


@dataclass
class PoolBatch:
    """What one update learns from; of a batch shared by several processes, the rows of this one."""

    tokens: Tensor  # [n, T]
    hidden: Tensor  # [n, T, D] the model's states that predict them
    batch_size: int  # of the whole batch

    def rows(self, part: slice) -> "PoolBatch":
        """The part of one process."""
        return PoolBatch(self.tokens[part], self.hidden[part], self.batch_size)


def draw_round(
    sigma: Sigma, twist: Twist | None, power: float, count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw N = count sequences from q_r, without resampling: tokens [N, T] and log_weights [N].

    q_r is the proposal by psi^power. A power below 1 makes it broader than q, so that it finds what
    psi has not seen yet.
    """
    flattened = None if twist is None else lambda hidden: power * twist(hidden)
    draws = sample_proposal(sigma.model, flattened, count, generator)
    log_weights = positive_log_weights(draws, sigma.log_potential)
    return {"tokens": draws.tokens, "log_weights": log_weights.double()}


@torch.no_grad()
def hidden_states(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The states [N, T, D] from which the model predicts sequences [N, T], in slices."""
    slices = row_slices(len(tokens), model.vocab_size * tokens.shape[1])
    return torch.cat([model.states(tokens[rows]) for rows in slices])


def batches_from_pool(
    model: LanguageModel,
    pool: Pool,
    least_ess: float,
    updates: int,
    batch_size: int,
    generator: torch.Generator,
) -> Callable[[int], PoolBatch]:
    """All batches of a fit, rows drawn by W; a row that is drawn often passes the model once."""
    weights = pool.weights(least_ess)
    count = updates * batch_size
    rows = torch.multinomial(weights, count, replacement=True, generator=generator)
    distinct, place = rows.unique(return_inverse=True)
    tokens = torch.cat(pool.tokens)[distinct]
    states = hidden_states(model, tokens)

    def draw_batch(update: int) -> PoolBatch:
        chosen = place[update * batch_size : (update + 1) * batch_size]
        return PoolBatch(tokens[chosen], states[chosen], batch_size)

    return draw_batch


def negative_log_proposal(twist: EmbeddingTwist, batch: PoolBatch) -> Tensor:
    """-log q(s_t | s_{0:t-1}) summed over the rows and divided by batch_size T, with gradient."""
    tilted = twist.tilted_logits(batch.hidden)  # [n, T, V]
    losses = F.cross_entropy(tilted.flatten(0, 1), batch.tokens.flatten(), reduction="sum")
    return losses / (batch.batch_size * batch.tokens.shape[1])


def learn_twist_from_pool(
    twist: EmbeddingTwist,
    optimizer: torch.optim.Optimizer,
    draw_batch: Callable[[int], PoolBatch],
    updates: int,
    report: Report = ignore,
) -> None:
    """Train `twist` in place; reports the loss of every step, before the step is taken."""
    for update in range(updates):
        loss = negative_log_proposal(twist, draw_batch(update))
        report(loss=loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
