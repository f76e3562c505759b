"""Direct preference optimisation of the base model, a baseline (paper eq. 9).

    s^(1..N) ~ p^(0), sorted by r = log phi: the top half is preferred to the bottom half
    L = mean over pairs of -log sigmoid(b (log pi(s+) / p^(0)(s+)) - b (log pi(s-) / p^(0)(s-)))

log pi(s) is the sum over tokens. Every update draws a new batch. L = log 2 where pi = p^(0).

Where the paper departs from Rafailov et al. 2023:
 1. Pairs are made online, out of samples of the reference; there they are a fixed, labelled set.
 2. The reward's order decides who is preferred, without the noise of the Bradley-Terry model. Only
    this order counts, so beta of the potential has no effect.
 3. A single prompt; AdamW at a constant rate, batches of 512 pairs; there RMSprop with a warm-up,
    batches of 64.

What the paper leaves open:
 4. The i-th best of the top half meets the i-th best of the bottom half; of an odd number of
    samples the middle one is left out.
 5. Equal rewards, -inf among them, keep the order of the batch, which is random. On average their
    pairs only hold the log-ratios together.

N sequences, M = floor(N / 2) pairs, T tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.baseline import ROWS, Baseline, BaselineOptions
from distill.finetune import Student


def preference_pairs(reward: Tensor) -> Tensor:
    """Indices [M, 2] of the preferred and the other sample of every pair, from rewards [N]."""
    order = reward.argsort(descending=True, stable=True)
    half = len(order) // 2
    return torch.stack([order[:half], order[len(order) - half :]], 1)


def dpo_loss(log_pi: Tensor, log_ref: Tensor, strength: float) -> Tensor:
    """L (eq. 9), a scalar, of sequence log-probs [M, 2], preferred sequences first."""
    log_ratio = log_pi - log_ref  # [M, 2]
    return -F.logsigmoid(strength * (log_ratio[:, 0] - log_ratio[:, 1])).mean()


class DPO(Baseline):
    """Trained by pairs of samples of p^(0)."""

    Options = BaselineOptions

    def update(self, student: Student, generator: torch.Generator) -> dict[str, float]:
        """One update; returns its loss. ValueError for a batch without a pair."""
        options = self.options
        if options.batch_size < 2:
            raise ValueError("--batch-size is 1, which makes no pair; give at least 2")
        batch = self.draw(self.base, generator)
        log_ref = batch.log_p.sum(-1)  # [N]
        pairs = preference_pairs(batch.log_phi)  # [M, 2]
        policy = self.base.with_network(student.network)
        total = 0.0
        for part in pairs.split(ROWS // 2):
            tokens = batch.tokens[part].flatten(0, 1)  # [2 m, T]
            log_pi = policy.log_probs(tokens).sum(-1).view(-1, 2)  # [m, 2]
            loss = dpo_loss(log_pi, log_ref[part], options.strength) * (len(part) / len(pairs))
            loss.backward()
            total += loss.item()
        student.step()
        return {"loss": total}
