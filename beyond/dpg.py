"""Another objective of the twist: KL(sigma||q) itself, of q proportional to p^(m) psi.

    L = E_sigma[-log q(s)],   log q(s) = sum_t log p(s_t) + log psi(s_{1:t}) - log N_t

This is weighted likelihood of q, which is trained as a policy (distributional policy gradients,
Parshakova et al. 2019). No q depends on the levels of psi, which could be added to log psi of all
tokens after a beginning, so they are not learned: runs that resample before T would go by chance.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.paper import Paper
from eval.options import Options, option
from tinystories.decoder import Conditional
from tsmc.draws import normalise
from twist.ctl import Batch
from twist.mlp import TwistMLP


@dataclass(frozen=True)
class DPGOptions(Options):
    ess_threshold: float = option(0.0, "0 alone: levels of psi are not learned", high=0)


class DPG(Paper):
    """The paper's learner with L in place of CTL, for batches of K; their logits take K T V."""

    Options = DPGOptions
    defaults = {"ctl_learning_rate": 5e-4}  # noqa: RUF012

    def twist_loss(self, psi: TwistMLP, batch: Batch, model: Conditional) -> Tensor:
        drawn = batch.drawn
        with torch.no_grad():
            log_p = model.head(drawn.hidden).log_softmax(-1)  # [K, T, V]
        log_normaliser = (log_p + psi(drawn.hidden)).logsumexp(-1)  # [K, T]
        log_q = drawn.log_p + psi.of_tokens(drawn.hidden, drawn.tokens) - log_normaliser
        return -(normalise(batch.log_positive())[:, None] * log_q).sum()
