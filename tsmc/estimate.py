"""Means with their standard errors.

    mean x-bar, error s / sqrt(N), N - 1 degrees of freedom

Intervals use Student's t. One value alone has an infinite error.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error, and the degrees of freedom of that error."""

    value: float
    std_error: float
    dof: float

    def quantile(self, probability: float) -> float:
        """The limit that the true value exceeds in a share 1 - probability of experiments."""
        if self.dof > 1e4:  # the normal distribution
            limit = torch.special.ndtri(torch.tensor(probability, dtype=torch.float64)).item()
            return self.value + self.std_error * limit
        # t = sqrt(dof) tan(angle) turns Student's density into a power of the cosine.
        angles = np.linspace(-np.pi / 2, np.pi / 2, 40001)[1:-1]
        density = np.cos(angles) ** (self.dof - 1)
        distribution = (np.cumsum(density) - density / 2) / density.sum()
        limit = math.sqrt(self.dof) * math.tan(np.interp(probability, distribution, angles))
        return self.value + self.std_error * limit

    def half_width(self) -> float:
        """Half of the 95 % interval."""
        return self.quantile(0.975) - self.value


def mean_estimate(values: Tensor) -> Estimate:
    """The mean of independent values [N] with its error; an infinite mean has no error."""
    values = values.cpu().double().flatten()
    mean = values.mean().item()
    if math.isinf(mean):
        return Estimate(mean, 0.0, math.inf)
    if len(values) < 2:
        return Estimate(mean, math.inf, math.inf)
    return Estimate(mean, values.std().item() / math.sqrt(len(values)), len(values) - 1.0)
