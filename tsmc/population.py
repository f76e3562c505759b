"""What the sampler gives: R independent runs of K particles at t = T, weighted, and the final resampling of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tsmc.weights import log_mean_exp, normalise


@dataclass
class Population:
    """R runs of K particles: a weighted set, and samples of equal weight."""

    tokens: Tensor  # [R, K, T]
    log_phi: Tensor  # [R, K] as the model sees it: log p + log phi is that of the target
    log_weights: Tensor  # [R, K] gathered since the last resampling before t = T
    ancestors: Tensor  # [R, K] of the final resampling
    samples: Tensor  # [R, K, T] equally weighted: the final resampling applied, then perhaps moved (`tsmc.moves`)
    log_z: Tensor  # [R] log Z-hat of each run
    ess: Tensor  # [R] effective sample size of log_weights

    def is_alive(self) -> Tensor:
        """Whether some particle of a run has a weight above zero [R]."""
        return self.log_z > -torch.inf

    def shares(self) -> Tensor:
        """Each particle's share of the weight of all runs [R, K] float64, a run counting by its Z-hat; zeros where all died."""
        runs, particles = normalise(self.log_z.cpu().double()), normalise(self.log_weights.cpu().double())
        return runs[:, None] * particles * self.is_alive().cpu()[:, None]

    def log_mean_z(self) -> float:
        """log of the mean of Z-hat over the runs, dead ones counting zero: what stands for log Z_sigma."""
        return log_mean_exp(self.log_z.cpu().double()).item()

    def alive(self) -> "Population":
        """The runs that are alive."""
        return Population(**{name: value[self.is_alive()] for name, value in vars(self).items()})


def follow(ancestors: Tensor, values: Tensor) -> Tensor:
    """What belongs to the ancestors [R, K], of values [R, K] or [R, K, t]."""
    index = ancestors if values.ndim == 2 else ancestors[..., None].expand_as(values)
    return values.gather(1, index)
