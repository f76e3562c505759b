"""Draws from a mixture of the proposal q and p^(0) itself, fixed numbers of each.

A share a of N texts is drawn from p = p^(0), the others from q. All are weighted by the density of
the mixture, the balance heuristic of Veach and Guibas (1995), which two weights of a text give:

    w(s) = p(s) phi(s) / (a p(s) + (1 - a) q(s)) = 1 / (a / phi(s) + (1 - a) / w_q(s)),
    w_q(s) = p(s) phi(s) / q(s)

The mean of w u is unbiased for all u, a sum_s p w u + (1 - a) sum_s q w u = sum_s p phi u, and no
weight is above phi / a, whereas w_q has no bound: q may have lost a text that sigma has.
"""

import math

import torch
from torch import Tensor

PLAIN = 0.3  # a: .2 to .5 are alike, by KL of a draw on seeds that no table shows


def mixture_log_weights(log_weights: Tensor, log_phi: Tensor, plain: float = PLAIN) -> Tensor:
    """log w of texts, from log w_q and log phi of each, all of one shape; 0 < plain = a < 1."""
    return -torch.logaddexp(math.log1p(-plain) - log_weights, math.log(plain) - log_phi)
