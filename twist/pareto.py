"""How heavy the tail of importance weights is: the shape k of a generalised Pareto distribution.

    P(w - u > x) = (1 + k x / scale)^(-1/k)  for weights w above the threshold u

Weights of shape k have 1/k moments: from k = 1/2 on no variance, so that the mean of N weights
has errors above 1 / sqrt(N), and above k = .7 it needs more draws than anybody has (Vehtari et al.
2024, Pareto smoothed importance sampling, sections 2 and 3). The threshold leaves the M = min(N /
5, 3 sqrt N) largest of N weights. Their k is the posterior mean of Zhang and Stephens (2009), drawn
to 1/2 as by ten further weights.
"""

import math

import torch
from torch import Tensor

TOO_HEAVY = 0.7


def pareto_k(log_weights: Tensor) -> float:
    """k of N log weights; NaN where N is at most 20, infinite where fewer than 5 are not zero."""
    log_weights = log_weights.double().flatten().sort().values
    weights = (log_weights - log_weights[-1]).exp()  # [N], ascending
    tail = min(math.ceil(len(weights) / 5), math.ceil(3 * math.sqrt(len(weights))))  # M
    if tail < 5:
        return math.nan
    below = weights[weights < weights[-tail]]  # by value, because equal texts have equal weights
    threshold = below[-1] if len(below) else 0.0
    excess = weights[-tail:] - threshold
    excess = excess[excess > 0]  # [M], ascending, unless there are fewer
    count = len(excess)
    if count < 5:
        return math.inf
    # -k / scale on a grid around what the first quartile says, weighed by its likelihood.
    grid = torch.arange(30 + int(math.sqrt(count))).double() + 0.5  # [J]
    quartile = excess[int(count / 4 + 0.5) - 1]
    theta = 1 / excess[-1] + (1 - (len(grid) / grid).sqrt()) / (3 * quartile)  # [J]
    k = torch.log1p(-theta[:, None] * excess).mean(1)  # [J]
    log_likelihood = count * ((-theta / k).log() - k - 1)
    theta = (log_likelihood.softmax(0) * theta).sum()
    k = torch.log1p(-theta * excess).mean().item()
    return (count * k + 10 * 0.5) / (count + 10)
