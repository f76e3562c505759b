"""Everything drawn counts: the twist learned from all sequences drawn so far, each at the weight of the proposal that drew it.

    w_i = p^(0)(s_i) phi(s_i) / q_r(s_i)                      the round r that drew s_i from q_r
    W_i = w_i^lambda / sum_{j in r} w_j^lambda * n_r / n      n_r the ESS of round r under lambda, n their sum
    loss = - sum_i W_i log q(s_i),  q = softmax(log p^(0) + log psi)      its minimum over all psi is at KL(sigma||q) = 0

so that at lambda = 1 learning psi minimises the KL that the table reports, where contrastive learning (twist/ctl.py) goes by
the sum over t of KL(sigma||pi_t). lambda is the largest up to 1 with n at or over a given number of sequences: while the
proposals are poor a few sequences would have all the weight.

The proposals of one round are independent of its draws, so w_i is unbiased: the mean of w over a round estimates Z_sigma. The
weights of the usual mixture of all proposals (Cornuet et al., adaptive multiple importance sampling, 2012) are not used: a
later proposal has learned the earlier sequences by heart, claims them, and the mixture then overstates how much is known.

q alone is learned, so log psi is known up to a constant for each prefix: good for proposing, of no use for resampling
before the last token. N sequences, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinystories.errors import InputError
from tsmc.proposal import LanguageModel, Twist
from tsmc.sampler import Sigma
from tsmc.steps import Chunks, Steps
from tsmc.trajectories import sample_proposal
from tsmc.weights import effective_sample_size, normalise
from twist.ctl import positive_log_weights

HALVINGS = 30  # of the interval that lambda is searched in


class Pool:
    """Weighted sequences after one prompt, round by round."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []  # [N_r, T] of each round
        self.log_weights: list[Tensor] = []  # [N_r] log w

    def add(self, tokens: Tensor, log_weights: Tensor) -> None:
        """A round: sequences [N_r, T] and log w [N_r]; InputError where a weight is NaN or infinite."""
        if not bool((log_weights < torch.inf).all()):
            raise InputError("twist learning: a weight is NaN or infinite; check the potential")
        self.tokens.append(tokens)
        self.log_weights.append(log_weights)

    def weights(self, tempering: float) -> Tensor:
        """W [N] under lambda = tempering, rounds one after the other; zero where nothing drawn has a weight."""
        tempered = [torch.where(w > -torch.inf, tempering * w, w) for w in self.log_weights]
        counts = torch.stack([effective_sample_size(w) for w in tempered])  # [rounds] n_r
        shares = counts / counts.sum().clamp(min=1.0)
        return torch.cat([share * normalise(w) for share, w in zip(shares, tempered, strict=True)])

    def ess(self, tempering: float) -> float:
        """n, the sum over rounds of ESS under lambda = tempering."""
        return sum(
            effective_sample_size(torch.where(w > -torch.inf, tempering * w, w)).item() for w in self.log_weights
        )

    def tempering(self, least: float) -> float:
        """The largest lambda up to 1 under which n is at least `least`, by bisection; about 0 where none is."""
        if self.ess(1.0) >= least:
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.ess(middle) >= least else (low, middle)
        return low


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


def draw_round(sigma: Sigma, twist: Twist | None, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Sequences [N, T] drawn i.i.d. from q, without resampling, and their log w [N]; N = chunks.total."""
    for size, generator in chunks:
        draws = sample_proposal(sigma.model, twist, size, generator)
        log_weights = positive_log_weights(draws, sigma.log_potential)
        chunks.keep(tokens=draws.tokens, log_weights=log_weights.double())
        chunks.report(ess=effective_sample_size(log_weights))
    kept = chunks.kept()
    return kept["tokens"], kept["log_weights"]


@torch.no_grad()
def hidden_states(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The states [N, T, D] from which the model predicts sequences [N, T]."""
    return torch.cat([model.log_probs(rows)[2] for rows in tokens.split(256)])


def batches_from_pools(
    models: Sequence[LanguageModel],
    pools: Sequence[Pool],
    least_ess: float,
    updates: int,
    batch_size: int,
    generator: torch.Generator,
) -> Callable[[int], PoolBatch]:
    """All batches of a fit, rows drawn by W, tempered until n is the share least_ess of a pool; the prompts take turns.

    Rows that are drawn several times go through the model once. InputError where nothing in a pool has a weight.
    """
    drawn = []
    for pool in pools:
        tokens = torch.cat(pool.tokens)
        weights = pool.weights(pool.tempering(least_ess * len(tokens)))
        if not weights.any():
            raise InputError(
                f"none of the {len(tokens)} sequences drawn has phi > 0; draw more, or soften the potential"
            )
        rows = torch.multinomial(weights, updates * batch_size, replacement=True, generator=generator)
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
