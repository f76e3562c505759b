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

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.finetune import ROWS, BaselineConfig, Student, rewards
from tsmc.interfaces import BaseModel, Report, ignore
from tsmc.proposal import sample_proposal


def preference_pairs(reward: Tensor) -> Tensor:
    """Indices [M, 2] of the preferred and the other sample of every pair, from rewards [N]."""
    order = reward.argsort(descending=True, stable=True)
    half = len(order) // 2
    return torch.stack([order[:half], order[len(order) - half :]], 1)


def dpo_loss(log_pi: Tensor, log_ref: Tensor, strength: float) -> Tensor:
    """L (eq. 9), a scalar, of sequence log-probs [M, 2], preferred sequences first."""
    log_ratio = log_pi - log_ref  # [M, 2]
    return -F.logsigmoid(strength * (log_ratio[:, 0] - log_ratio[:, 1])).mean()


def dpo(
    base: BaseModel,
    log_phi: Callable[[Tensor], Tensor],
    config: BaselineConfig,
    lora: bool,
    generator: torch.Generator,
    report: Report = ignore,
) -> BaseModel:
    """pi, trained from p^(0) = base, a plain network that is kept, for log_phi(tokens [N, T]) [N].

    Reports the loss of every step. InputError where log phi is NaN or +inf, Diverged where the
    trained model is not finite.
    """
    student = Student(base.network, config.learning_rate, config.weight_decay, lora, generator)
    policy = student.after(base)
    reference = base

    def loss(tokens: Tensor, log_ref: Tensor) -> Tensor:
        log_pi = policy.log_probs(tokens.flatten(0, 1))[0].sum(-1)  # [2 M]
        return dpo_loss(log_pi.view(-1, 2), log_ref, config.strength)

    for _ in range(config.updates):
        batch = sample_proposal(reference, None, config.batch_size, generator)
        pairs = preference_pairs(rewards(log_phi, batch.tokens))  # [M, 2]
        tokens = batch.tokens[pairs]  # [M, 2, T]
        log_ref = batch.log_p.sum(-1)[pairs]  # [M, 2]
        report(loss=student.update(loss, ROWS // 2, tokens, log_ref))
    return base.with_network(student.finish())
