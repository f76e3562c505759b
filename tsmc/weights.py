"""Importance weights in log space: normalising, effective sample size, evidence increments.

Populations are rows: log_weights [R, K] holds R independent runs of K particles, and everything here acts on the last axis.
A run whose weights are all zero (log weight -inf) is dead: its evidence is -inf and its normalised weights are uniform, so
that nothing downstream divides by zero. K is particles.
"""

import math

import torch
from torch import Tensor


def normalise(log_weights: Tensor) -> Tensor:
    """Weights that sum to one [..., K]; uniform where all log weights are -inf."""
    alive = log_weights.amax(-1, keepdim=True) > -torch.inf
    return torch.where(alive, log_weights, 0.0).softmax(-1)


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """ESS = 1 / sum_k W_k^2 [...], between 1 and K; 0 for a dead run."""
    ess = 1.0 / normalise(log_weights).square().sum(-1)
    return torch.where(log_weights.amax(-1) > -torch.inf, ess, 0.0)


def log_mean_exp(log_weights: Tensor) -> Tensor:
    """log (1/K) sum_k exp(log_weights_k) [...]: the evidence gained when these weights are resampled."""
    return log_weights.logsumexp(-1) - math.log(log_weights.shape[-1])
