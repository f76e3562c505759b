"""Objectives of psi by name: CTL, the paper's, and two that it is compared with.

    ctl    twist/ctl.py                                                              eq. 6
    sixo   -log sigmoid(log psi) under sigma, -log sigmoid(-log psi) under p^(m)     for each t
    dpg    KL(sigma||q) itself, of q proportional to p^(m) psi

Each is a function of psi and a batch. One of your own is another, with an entry of OBJECTIVES, or
what a subclass of `Paper` calls in its place. K sequences, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tsmc.draws import normalise
from twist.ctl import Batch, ctl_loss
from twist.mlp import TwistMLP


def sixo_loss(twist: TwistMLP, batch: Batch) -> Tensor:
    """For each t the loss of a classifier of sigma against p^(m) whose logit is log psi(s_{1:t}).

    Its optimum is psi = sigma(s_{1:t}) / p^(m)(s_{1:t}), psi* over Z: density ratios, as SIXO
    estimates them (Lawson et al. 2022).
    """
    positive = normalise(batch.log_positive())  # [K]
    negative = normalise((batch.log_p - batch.log_q).cumsum(-1).T).T  # [K, T] p^(m) / q
    log_psi = batch.log_psi_of(twist)  # [K, T]
    losses = positive[:, None] * F.logsigmoid(log_psi) + negative * F.logsigmoid(-log_psi)
    return -losses.sum()


def dpg_loss(twist: TwistMLP, batch: Batch) -> Tensor:
    """E_sigma[-log q(s)], which is KL(sigma||q) but for a constant: weighted likelihood of q.

    q is trained as a policy, by distributional policy gradients (Parshakova et al. 2019). It has no
    use for the levels of psi, on which no q depends. Logits of all places take K T V numbers.
    """
    positive = normalise(batch.log_positive())  # [K]
    with torch.no_grad():
        log_p = batch.model.head(batch.hidden).log_softmax(-1)  # [K, T, V] of p^(m)
    log_normaliser = (log_p + twist(batch.hidden)).logsumexp(-1)  # [K, T]
    log_q = batch.log_p + twist.of_tokens(batch.hidden, batch.tokens) - log_normaliser
    return -(positive[:, None] * log_q.masked_fill(~batch.is_counted, 0.0)).sum()


OBJECTIVES = {"ctl": ctl_loss, "sixo": sixo_loss, "dpg": dpg_loss}
