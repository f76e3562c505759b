"""Means with their standard errors, and how heavy the tail of importance weights is.

    mean x-bar, error s / sqrt(N), N - 1 degrees of freedom
    P(w - u > x) = (1 + k x / scale)^(-1/k)   for weights w above the threshold u

Intervals use Student's t. One value alone has an infinite error. Weights of shape k have 1/k
moments: from k = 1/2 on no variance, so that the mean of N weights has errors above 1 / sqrt(N),
and above k = .7 it needs more draws than anybody has (Vehtari et al. 2024, Pareto smoothed
importance sampling, sections 2 and 3).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tsmc.draws import log_mean_exp


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error with its degrees of freedom, and bounds of the value."""

    value: float
    std_error: float
    dof: float
    low: float = -math.inf
    high: float = math.inf

    def quantile(self, probability: float) -> float:
        """The limit that the true value exceeds in a share 1 - probability of experiments."""
        # t = sqrt(dof) tan(angle) turns Student's density into a power of the cosine.
        angles = np.linspace(-np.pi / 2, np.pi / 2, 40001)[1:-1]
        density = np.cos(angles) ** (self.dof - 1)
        distribution = (np.cumsum(density) - density / 2) / density.sum()
        limit = math.sqrt(self.dof) * math.tan(np.interp(probability, distribution, angles))
        return min(self.high, max(self.low, self.value + self.std_error * limit))

    def half_width(self) -> float:
        """The longer half of the 95 % interval."""
        return max(self.quantile(0.975) - self.value, self.value - self.quantile(0.025))


def mean_estimate(values: Tensor) -> Estimate:
    """The mean of independent values [N] with its error; an infinite mean has no error."""
    values = values.cpu().double().flatten()
    mean = values.mean().item()
    if math.isinf(mean):
        return Estimate(mean, 0.0, 1.0)
    if len(values) < 2:
        return Estimate(mean, math.inf, 1.0)
    return Estimate(mean, values.std().item() / math.sqrt(len(values)), len(values) - 1.0)


def log_mean_estimate(log_values: Tensor, effective_count: float | None = None) -> Estimate:
    """log of the mean of exp(log_values [N]), with the error of that log by the delta method.

    The degrees of freedom are those of `effective_count` values, by default of N.
    """
    values = log_values.cpu().double()
    log_mean = log_mean_exp(values).item()
    dof = max(1.0, (effective_count or len(values)) - 1.0)
    if len(values) < 2 or log_mean == -math.inf:
        return Estimate(log_mean, math.inf, dof)
    relative = (values - log_mean).exp()  # of mean one
    return Estimate(log_mean, relative.std().item() / math.sqrt(len(values)), dof)


def pareto_k(log_weights: Tensor) -> float:
    """k of N log weights: NaN where N is at most 20, infinite where fewer than 5 weights are above
    zero, and NaN where fewer than 5 of the largest differ.

    The threshold leaves the M = min(N / 5, 3 sqrt N) largest weights, of which equal ones, such as
    those of equal texts, count once. Their k is the posterior mean of Zhang and Stephens (2009),
    drawn to 1/2 as by ten further weights.
    """
    log_weights = log_weights.double().flatten().sort().values
    # Ascending; where all are zero, so are the differences that are not defined.
    weights = (log_weights - log_weights[-1]).exp().nan_to_num()  # [N]
    tail = math.ceil(min(len(weights) / 5, 3 * math.sqrt(len(weights))))  # M
    if tail < 5:
        return math.nan
    if weights[-5] == 0:
        return math.inf
    below = weights[weights < weights[-tail]]  # by value: some may equal the least of the tail
    threshold = below[-1] if len(below) else 0.0
    excess = weights[-tail:].unique() - threshold  # ascending; without ties M of them
    excess = excess[excess > 0]
    count = len(excess)
    if count < 5:
        return math.nan
    # -k / scale on a grid around what the first quartile says, weighed by its likelihood.
    grid = torch.arange(30 + int(math.sqrt(count))).double() + 0.5  # [J]
    quartile = excess[int(count / 4 + 0.5) - 1]
    theta = 1 / excess[-1] + (1 - (len(grid) / grid).sqrt()) / (3 * quartile)  # [J]
    k = torch.log1p(-theta[:, None] * excess).mean(1)  # [J]
    log_likelihood = count * ((-theta / k).log() - k - 1)
    theta = (log_likelihood.softmax(0) * theta).sum()
    k = torch.log1p(-theta * excess).mean().item()
    return (count * k + 10 * 0.5) / (count + 10)
