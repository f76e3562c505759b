"""Another objective of the twist: KL(sigma||q) itself, of q proportional to p^(m) psi.

    L = E_sigma[-log q(s)],   log q(s) = sum_t log p(s_t) + log psi(s_{1:t}) - log N_t

This is weighted likelihood of q, which is trained as a policy (distributional policy gradients,
Parshakova et al. 2019), with CTL's positive weights. No q depends on the levels of psi, the numbers
that can be added to log psi of all tokens after a beginning, and they are not learned: the weights
by which runs resample before T would be arbitrary. K sequences, T tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.paper import Paper
from eval.options import Options
from tinystories.decoder import Conditional
from tsmc.draws import normalise
from twist.ctl import Batch
from twist.mlp import TwistMLP


def dpg_loss(twist: TwistMLP, batch: Batch, model: Conditional) -> Tensor:
    """L, a scalar up to a constant, for p^(m) = model; its logits take K T V numbers."""
    positive = normalise(batch.log_positive())  # [K]
    drawn = batch.drawn
    with torch.no_grad():
        log_p = model.head(drawn.hidden).log_softmax(-1)  # [K, T, V]
    log_normaliser = (log_p + twist(drawn.hidden)).logsumexp(-1)  # [K, T]
    log_q = drawn.log_p + twist.of_tokens(drawn.hidden, drawn.tokens) - log_normaliser
    return -(positive[:, None] * log_q).sum()


@dataclass(frozen=True)
class DPGOptions(Options):
    """Those of the paper's learner; ValueError for runs that resample before T."""

    def __post_init__(self):
        super().__post_init__()
        if self.ess_threshold > 0:
            raise ValueError("--learner dpg learns no levels of psi; leave --ess-threshold out")


class DPG(Paper):
    """The paper's learner with L in place of CTL."""

    Options = DPGOptions
    defaults = {"ctl_learning_rate": 5e-4}  # noqa: RUF012

    def twist_loss(self, psi: TwistMLP, batch: Batch, model: Conditional) -> Tensor:
        return dpg_loss(psi, batch, model)
