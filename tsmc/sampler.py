"""Twisted SMC: s_{1:T} ~ TSMC(p, psi), R independent runs of K particles in one batch (paper, the three steps before Sec. 2).

For t = 1..T, with log psi(s_{1:0}) = 0:
    extend      s_t ~ q_t                                                          tsmc.proposal.propose
    reweight    t < T:  log w_t = log sum_v p(v) psi(s_{1:t-1}, v) - log psi(s_{1:t-1})
                t = T:  log w_T = log p(s_T) + log phi(s_{1:T}) - log q_T(s_T) - log psi(s_{1:T-1})
    resample    ancestors from the weights gathered since the last resampling

At t = T the normaliser over phi is out of reach, so psi stands in for phi in the proposal and the weight makes up for it.
The evidence log Z-hat gains log-mean-exp of the cumulative log weights whenever they are resampled; exp(log Z-hat) is an
unbiased estimate of Z_sigma under any resampling scheme and threshold.

Conditional TSMC is the same loop with one sequence per run given beforehand: particle 0 takes its tokens and is its own
ancestor, every other particle draws its ancestor from all K. Given an exact sample of sigma, 1 / Z-hat is an unbiased
estimate of 1 / Z_sigma, at any threshold. That needs ancestors drawn independently, hence multinomial resampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinystories.errors import InputError
from tinystories.fast import steady_weights
from tsmc.categorical import uniforms
from tsmc.proposal import LanguageModel, Twist, propose
from tsmc.resampling import Scheme, multinomial
from tsmc.weights import effective_sample_size, log_mean_exp, normalise

LogPotential = Callable[[Tensor, Tensor], Tensor]
"""log_potential(tokens [N, T], log_p [N]) -> log phi [N]; log_p = log p(s_{1:T}), which effective potentials divide out."""


@dataclass(frozen=True)
class Sigma:
    """The target, proportional to p(s) phi(s), as seen from one language model after one prompt."""

    model: LanguageModel
    log_potential: LogPotential


class Observer(Protocol):
    """Sees every step before its resampling takes effect: tokens [R, K, t], log_psi, log_w and log_weights [R, K], ess [R],
    ancestors [R, K]. Called with the sampler's own tensors: copy what is kept, change nothing."""

    def __call__(
        self,
        t: int,
        tokens: Tensor,
        log_psi: Tensor,
        log_w: Tensor,
        log_weights: Tensor,
        ess: Tensor,
        ancestors: Tensor,
    ) -> None: ...


@dataclass
class Population:
    """R runs of K particles: a weighted set, and the final resampling of it."""

    tokens: Tensor  # [R, K, T]
    log_weights: Tensor  # [R, K] gathered since the last resampling before t = T
    ancestors: Tensor  # [R, K] of the final resampling
    log_z: Tensor  # [R] log Z-hat of each run
    ess: Tensor  # [R] effective sample size of log_weights

    def samples(self) -> Tensor:
        """Equally weighted particles [R, K, T]: the final resampling applied."""
        return self.tokens.gather(1, self.ancestors[..., None].expand_as(self.tokens))

    def alive(self) -> "Population":
        """The runs in which some particle has a weight above zero."""
        living = self.log_z > -torch.inf
        return Population(**{name: value[living] for name, value in vars(self).items()})


def check_options(particles: int, runs: int, ess_threshold: float, length: int) -> None:
    """Raise InputError for sizes or a threshold with which nothing can be sampled."""
    if min(particles, runs, length) < 1:
        sizes = f"{runs} runs of {particles} particles with {length} tokens"
        raise InputError(f"{sizes} cannot be sampled; give particles, runs and length of at least 1")
    if not 0 <= ess_threshold <= 1:
        raise InputError(f"--ess-threshold {ess_threshold} is no share of the particles; give a number from 0 to 1")


def check_reference(reference: Tensor, runs: int, length: int, resample: Scheme) -> None:
    """Raise InputError where conditional TSMC is undefined for a reference [R, T] or for the resampling scheme."""
    if reference.shape != (runs, length):
        shapes = f"{list(reference.shape)} where [{runs}, {length}] is needed"
        raise InputError(f"the reference has shape {shapes}; give each run one sequence")
    if resample is not multinomial:
        raise InputError("conditional TSMC needs ancestors drawn independently; use --resampling multinomial")


def given_tokens(reference: Tensor, particles: int) -> Tensor:
    """Tokens [R * K] that are not drawn: the reference's [R] in slot 0 of every run, -1 for "draw it" elsewhere."""
    given = torch.full((len(reference), particles), -1, device=reference.device)
    given[:, 0] = reference
    return given.flatten()


def draw_ancestors(
    log_weights: Tensor,
    resampling: Tensor,
    resample: Scheme,
    generator: torch.Generator,
    every_run: bool,
    conditional: bool,
) -> Tensor:
    """Ancestors [R, K]: drawn in the runs that are resampling [R]; the particle itself in the others and in slot 0 of a
    conditional run. Where every run resamples there is no need to wait for the device's answer."""
    itself = torch.arange(log_weights.shape[1], device=log_weights.device).expand_as(log_weights)
    if not (every_run or bool(resampling.any())):
        return itself
    ancestors = torch.where(resampling[:, None], resample(normalise(log_weights), generator), itself)
    return torch.where((itself == 0) & conditional, itself, ancestors)


@torch.no_grad()
@steady_weights()
def tsmc(
    model: LanguageModel,
    twist: Twist | None,
    log_potential: LogPotential,
    particles: int,
    generator: torch.Generator,
    runs: int = 1,
    resample: Scheme = multinomial,
    ess_threshold: float = 1.0,
    observer: Observer | None = None,
    reference: Tensor | None = None,
) -> Population:
    """R = runs independent populations of K = particles sequences.

    A run resamples where its ESS is under ess_threshold * K: at every step for 1 (the paper), never for 0. The final
    resampling is always drawn; `Population` keeps the weights it was drawn from. reference [R, T] makes it conditional
    TSMC. InputError for options out of range, and where a weight came out NaN or infinite.
    """
    check_options(particles, runs, ess_threshold, model.length)
    if reference is not None:
        check_reference(reference, runs, model.length, resample)
    decoder = model.decoder(runs * particles)
    logits = decoder.logits_of(slice(0, 1))  # [1, V]: for its type and device
    zeros = torch.zeros(runs, particles, dtype=logits.dtype, device=logits.device)
    log_p = log_psi = log_weights = zeros  # [R, K]
    log_z = zeros[:, 0]  # [R]
    tokens = torch.empty(runs, particles, 0, dtype=torch.long, device=zeros.device)
    for t in range(1, model.length + 1):
        given = None if reference is None else given_tokens(reference[:, t - 1], particles)
        step = propose(decoder, twist, uniforms(runs * particles, 1, log_p, generator), given)
        log_p = log_p + step.log_p.view(runs, particles)
        tokens = torch.cat([tokens, step.tokens.view(runs, particles, 1)], -1)  # [R, K, t]

        if t < model.length:
            log_w = step.log_normaliser.view(runs, particles) - log_psi
        else:
            log_phi = log_potential(tokens.flatten(0, 1), log_p.flatten())  # [R * K]
            log_w = (step.log_p + log_phi - step.log_q).view(runs, particles) - log_psi
        log_psi = step.log_psi.view(runs, particles)
        log_weights = log_weights + log_w

        ess = effective_sample_size(log_weights)  # [R]
        resampling = (ess < ess_threshold * particles) | (ess_threshold >= 1) | (t == model.length)
        every_run = ess_threshold >= 1 or t == model.length
        drawing = (log_weights, resampling, resample, generator)
        ancestors = draw_ancestors(*drawing, every_run=every_run, conditional=reference is not None)
        if observer is not None:
            observer(t, tokens, log_psi, log_w, log_weights, ess, ancestors)
        log_z = torch.where(resampling, log_z + log_mean_exp(log_weights), log_z)
        if t < model.length:
            log_weights = torch.where(resampling[:, None], 0.0, log_weights)
            log_p, log_psi = log_p.gather(1, ancestors), log_psi.gather(1, ancestors)
            tokens = tokens.gather(1, ancestors[..., None].expand_as(tokens))
            rows = ancestors + particles * torch.arange(runs, device=zeros.device)[:, None]  # [R, K]
            decoder.extend(tokens[..., -1].flatten(), rows.flatten())

    if not bool((log_z < torch.inf).all()):
        raise InputError("log Z-hat is NaN or infinite: check that log phi and the twist's outputs are never NaN")
    return Population(tokens, log_weights, ancestors, log_z, ess)
