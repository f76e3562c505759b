"""How heavy the tail of importance weights is.

    P(w - u > x) = (1 + k x / scale)^(-1/k)   for weights w above the threshold u

Weights of shape k have 1/k moments: from k = 1/2 on no variance, so that the mean of N weights has
errors above 1 / sqrt(N), and above k = .7 it needs more draws than anybody has (Vehtari et al.
2024, Pareto smoothed importance sampling, sections 2 and 3). N weights.
"""

import math

import torch
from torch import Tensor


def pareto_k(log_weights: Tensor) -> float:
    """k of N log weights; NaN where N is at most 20, or fewer than 5 of the largest differ, and
    infinite where fewer than 5 weights are above zero.

    The threshold leaves the M = min(N / 5, 3 sqrt N) largest weights, of which equal ones count
    once. Their k is the posterior mean of Zhang and Stephens (2009), drawn to 1/2 as by ten."""
    log_weights = log_weights.cpu().double().flatten().sort().values
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
