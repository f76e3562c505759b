"""The paper's baselines: a policy pi that is trained from p^(0) by new texts for each update.

DPO, direct preference optimisation (eq. 9):

    s^(1..N) ~ p^(0), sorted by r = log phi: the top half is preferred to the bottom half
    L = mean over pairs of -log sigmoid(b (log pi(s+) / p^(0)(s+)) - b (log pi(s-) / p^(0)(s-)))

GRPO, group relative policy optimisation (eq. 10):

    s^(1..N) ~ pi,   r = log phi,   A^(n) = (r^(n) - mean r) / std r
    L = mean over n and t of  -(pi / sg(pi)) A^(n) + b (p^(0) / pi - log(p^(0) / pi) - 1),
    where pi and p^(0) are those of s_t^(n) given its past

Each update has new samples, so there is no older policy to clip by. What the paper leaves open: the
i-th best of the top half meets the i-th best of the bottom half; r is log phi, as phi is near zero
on almost all samples; beside a reward of -inf A is that of the indicator of phi > 0. The gradient
of GRPO's penalty is on average that of KL(p^(0) || pi), while its value estimates KL(pi || p^(0)).

N sequences, M = floor(N / 2) pairs, T tokens; sg stops the gradient.
"""

import abc

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.finetune import Student
from distill.pair import Pair
from distill.paper import Paper
from tinystories.decoder import Conditional
from tsmc.sigma import Sigma
from tsmc.streams import progress
from twist.ctl import Batch, draw_batch


def preference_pairs(reward: Tensor) -> Tensor:
    """Indices [M, 2] of the preferred and the other sample of every pair, from rewards [N]."""
    order = reward.argsort(descending=True, stable=True)
    half = len(order) // 2
    return torch.stack([order[:half], order[-half:]], 1)


def dpo_loss(log_pi: Tensor, log_ref: Tensor, strength: float) -> Tensor:
    """L (eq. 9), a scalar, of sequence log-probs [M, 2], preferred sequences first."""
    log_ratio = log_pi - log_ref  # [M, 2]
    return -F.logsigmoid(strength * (log_ratio[:, 0] - log_ratio[:, 1])).mean()


def advantages(reward: Tensor) -> Tensor:
    """A [N], of mean 0 and variance 1, or all zero, of rewards [N], which may hold -inf."""
    possible = reward > -torch.inf
    reward = (reward if possible.all() else possible).double()
    # A spread below the rounding of float32 scores would otherwise be blown up to size 1.
    if reward.std(correction=0) <= 1e-6 * reward.abs().max():
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / reward.std(correction=0)


def grpo_loss(log_pi: Tensor, log_ref: Tensor, advantage: Tensor, strength: float) -> Tensor:
    """L (eq. 10), a scalar, of token log-probs [N, T] and advantages [N]."""
    ratio = (log_pi - log_pi.detach()).exp()  # [N, T], equal to 1
    log_ratio = log_ref - log_pi  # [N, T]
    k3 = log_ratio.exp() - log_ratio - 1
    return (strength * k3 - ratio * advantage[:, None].to(ratio.dtype)).mean(1).mean()


class Policy(Paper):
    """A policy, trained from p^(0) in generation 0 and further in each that follows; psi = 1."""

    defaults = {"generations": 0, "resampling": "systematic"}  # noqa: RUF012
    is_policy = True
    draws_base = False  # whether an update learns from texts of p^(0) rather than of the policy

    def distil(self, pair: Pair, m: int) -> Conditional:
        """The policy from which generation m goes on; `learn_twist` trains it."""
        return pair.model

    def learn_twist(self, model: Conditional, m: int) -> Pair:
        """The policy of generation m, trained from `model`."""
        options = self.options
        generator = self.streams.stream("fine-tuning", m)
        is_lora = options.student == "lora"
        student = Student(model.network, options.learning_rate, is_lora, generator)
        policy = self.base.with_network(student.network)
        # phi itself is the reward, whichever model draws.
        sigma = Sigma(self.base if self.draws_base else policy, self.base, self.log_phi, False)
        for _ in progress(range(options.updates), "fine-tuning", m):
            batch = draw_batch(sigma, None, options.batch_size, generator)
            self.loss(policy, batch).backward()
            student.step()
            self.note(log_phi=batch.log_phi.mean())
        return Pair(self.base.with_network(student.finish()), None)

    @abc.abstractmethod
    def loss(self, policy: Conditional, batch: Batch) -> Tensor:
        """A scalar of a batch, which the policy descends."""

    def scored(self, m: int) -> int:
        return (m + 1) * self.options.updates * self.options.batch_size


class DPO(Policy):
    """Trained by pairs of samples of p^(0), at least two for an update."""

    draws_base = True

    def loss(self, policy: Conditional, batch: Batch) -> Tensor:
        pairs = preference_pairs(batch.log_phi)  # [M, 2]
        log_pi = policy.log_probs(batch.drawn.tokens).sum(-1)  # [N]
        return dpo_loss(log_pi[pairs], batch.drawn.log_p.sum(-1)[pairs], self.options.strength)


class GRPO(Policy):
    """Trained by the advantages of its own samples."""

    defaults = Policy.defaults | {"learning_rate": 3e-5, "strength": 0.64, "updates": 250}

    def loss(self, policy: Conditional, batch: Batch) -> Tensor:
        with torch.no_grad():
            log_ref = self.base.log_probs(batch.drawn.tokens)  # [N, T]
        log_pi = policy.log_probs(batch.drawn.tokens)  # [N, T]
        return grpo_loss(log_pi, log_ref, advantages(batch.log_phi), self.options.strength)
