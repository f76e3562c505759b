"""Everything drawn counts: the twist learned from all sequences drawn so far, each at the weight of the proposal that drew it.

    w_i = p^(0)(s_i) phi(s_i) / q_r(s_i)                      the round r drew s_i from q_r
    W_i = min(w_i, c) / sum_j min(w_j, c)                     truncated importance sampling (Ionides, 2008)
    loss = - sum_i W_i log q(s_i),  q = softmax(log p^(0) + log psi)

This is self-distillation (eq. 7) into the twist instead of into the model. For c = infinity the loss differs from KL(sigma||q),
which the table reports, by a constant; contrastive learning (twist/ctl.py) goes by the sum over t of KL(sigma||pi_t). While
proposals are poor a few sequences have all the weight; c is the largest under which the ESS of W is a given number.

The proposal of a round does not depend on the draws of that round, so E[w_i] = Z_sigma whatever the earlier rounds were. The
weights of a mixture of all proposals (adaptive multiple importance sampling; Cornuet et al., 2012) vary less, but are not
used: a later proposal has learned the earlier sequences by heart, claims them, and so hides how little is known.

q alone is learned, so log psi is known up to a constant for each prefix: good for proposing, of no use for resampling
before the last token. N sequences, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError
from tsmc.interfaces import LanguageModel, Twist, chunks
from tsmc.sampler import Sigma
from tsmc.steps import Chunks, Steps
from tsmc.trajectories import sample_proposal
from tsmc.weights import effective_sample_size, normalise
from twist.ctl import positive_log_weights
from twist.embedding import EmbeddingTwist

HALVINGS = 40  # of the interval that log c is searched in


class Pool:
    """Weighted sequences after one prompt."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []  # [N_r, T] of each round
        self.log_weights: list[Tensor] = []  # [N_r] log w

    def add(self, tokens: Tensor, log_weights: Tensor) -> None:
        """A round: sequences [N_r, T] and log w [N_r]; InputError where a weight is NaN or infinite."""
        if not bool((log_weights < torch.inf).all()):
            raise InputError("twist learning: a weight is NaN or infinite; check the potential")
        self.tokens.append(tokens)
        self.log_weights.append(log_weights)

    def weights(self, least_ess: float) -> Tensor:
        """W [N], all rounds together, for the largest c with which their ESS is this share of N, or as near as can be.

        InputError where no sequence has a weight.
        """
        log_weights = torch.cat(self.log_weights)
        alive = log_weights[log_weights > -torch.inf]
        if not len(alive):
            raise InputError(
                f"none of the {len(log_weights)} sequences drawn has phi > 0; draw more, or soften the potential"
            )
        low, high = alive.min(), alive.max()
        if effective_sample_size(log_weights) < least_ess * len(log_weights):
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                enough = effective_sample_size(log_weights.clamp(max=middle)) >= least_ess * len(log_weights)
                low, high = (middle, high) if enough else (low, middle)
            high = low
        return normalise(log_weights.clamp(max=high))


@dataclass
class PoolBatch:
    """What one update learns from."""

    model: LanguageModel
    tokens: Tensor  # [n, T]
    hidden: Tensor  # [n, T, D] the states of `model` that predict them
    batch_size: int  # of the whole batch; n where one process learns alone

    def rows(self, part: slice) -> "PoolBatch":
        """The part of one process among several."""
        return PoolBatch(self.model, self.tokens[part], self.hidden[part], self.batch_size)


def draw_round(sigma: Sigma, twist: Twist | None, power: float, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Sequences [N, T] drawn i.i.d. from q_r, without resampling, and their log w [N]; N = chunks.total.

    q_r is the proposal by psi^power. Below 1 it is broader than q, and finds what psi has not seen yet.
    """
    flattened = None if twist is None else lambda hidden: power * twist(hidden)
    for size, generator in chunks:
        draws = sample_proposal(sigma.model, flattened, size, generator)
        log_weights = positive_log_weights(draws, sigma.log_potential)
        chunks.keep(tokens=draws.tokens, log_weights=log_weights.double())
        chunks.report(ess=effective_sample_size(log_weights))
    kept = chunks.kept()
    return kept["tokens"], kept["log_weights"]


@torch.no_grad()
def hidden_states(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The states [N, T, D] from which the model predicts sequences [N, T], in chunks as `tsmc.scoring` takes them."""
    parts = chunks(len(tokens), model.vocab_size * tokens.shape[1])
    return torch.cat([model.states(tokens[rows]) for rows in parts])


def batches_from_pools(
    models: Sequence[LanguageModel],
    pools: Sequence[Pool],
    least_ess: float,
    updates: int,
    batch_size: int,
    generator: torch.Generator,
) -> Callable[[int], PoolBatch]:
    """All batches of a fit, rows drawn by W; the prompts take turns. A row that is drawn often goes through the model once."""
    drawn = []
    for pool in pools:
        tokens = torch.cat(pool.tokens)
        rows = torch.multinomial(pool.weights(least_ess), updates * batch_size, replacement=True, generator=generator)
        drawn.append((tokens, *rows.unique(return_inverse=True)))
    states = [hidden_states(model, tokens[rows]) for model, (tokens, rows, _) in zip(models, drawn, strict=True)]

    def draw(update: int) -> PoolBatch:
        prompt = update % len(models)
        tokens, rows, places = drawn[prompt]
        chosen = places[update * batch_size : (update + 1) * batch_size]
        return PoolBatch(models[prompt], tokens[rows[chosen]], states[prompt][chosen], batch_size)

    return draw


def negative_log_proposal(twist: Twist, batch: PoolBatch) -> Tensor:
    """-log q(s_t | s_{0:t-1}) summed over the rows of `batch` and divided by batch_size T, a scalar with gradient in psi."""
    if isinstance(twist, EmbeddingTwist):
        tilted = twist.tilted_logits(batch.hidden)  # [n, T, V]
    else:
        with torch.no_grad():
            logits = batch.model.head(batch.hidden)  # [n, T, V]
        tilted = logits + twist(batch.hidden)  # [n, T, V]
    losses = F.cross_entropy(tilted.flatten(0, 1), batch.tokens.flatten(), reduction="sum")
    return losses / (batch.batch_size * batch.tokens.shape[1])


def learn_twist_from_pools(
    twist: Twist, optimizer: torch.optim.Optimizer, draw_batch: Callable[[int], PoolBatch], steps: Steps
) -> None:
    """Train `twist` in place; reports the loss of every step, before the step is taken."""
    for update in steps:
        loss = negative_log_proposal(twist, draw_batch(update))
        steps.report(loss=loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
