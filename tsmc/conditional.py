"""Conditional twisted SMC: every run is given one sequence beforehand, its reference (Zhao et al. 2024; Andrieu et al. 2010).

The three steps of `tsmc.sampler` with two changes. Particle 0 takes the reference's tokens instead of drawn ones, and is its
own ancestor; every other particle draws its ancestor from all K, independently, hence multinomial resampling. Given an
exact sample of sigma, the mean of 1 / Z-hat is P(Z-hat > 0 in an unconditional run) / Z_sigma, at any threshold: 1 / Z_sigma
where no run can die, and never more. So E[log Z-hat] is an upper bound on log Z_sigma (`tsmc.bounds`). R runs, K particles.
"""

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.categorical import uniforms
from tsmc.interfaces import LanguageModel, LogPotential, Observer, Twist
from tsmc.population import Population
from tsmc.proposal import propose
from tsmc.resampling import multinomial
from tsmc.sampler import Particles


@torch.no_grad()
def conditional_tsmc(
    model: LanguageModel,
    twist: Twist | None,
    log_potential: LogPotential,
    reference: Tensor,
    particles: int,
    generator: torch.Generator,
    ess_threshold: float = 1.0,
    observer: Observer | None = None,
) -> Population:
    """A population of K = particles for each reference [R, T], which stands in slot 0; InputError where shapes do not fit."""
    if reference.ndim != 2 or reference.shape[1] != model.length:
        shapes = f"{list(reference.shape)} where {[len(reference), model.length]} is needed"
        raise InputError(f"the reference has shape {shapes}; give each run one sequence")
    cloud = Particles(model, log_potential, len(reference), particles)
    forced = torch.full((len(reference), particles), -1, device=reference.device)  # -1: the token is drawn
    for t in range(model.length):
        forced[:, 0] = reference[:, t]
        cloud.extend(propose(cloud.decoder, twist, uniforms(forced.numel(), 1, generator), forced.flatten()))
        cloud.reweight()
        is_due = cloud.is_due(ess_threshold)
        ancestors = cloud.draw_ancestors(is_due, multinomial, generator).clone()
        ancestors[:, 0] = 0
        if observer is not None:
            observer(cloud, ancestors)
        cloud.resample(is_due, ancestors)
    return cloud.population(ancestors)
