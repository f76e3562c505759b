"""Twisted SMC: s_{1:T} ~ TSMC(p, psi), R independent runs of K particles in one batch (paper, the three steps before Sec. 2).

For t = 1..T, with log psi(s_{1:0}) = 0:
    extend      s_t ~ q_t                                                          tsmc.proposal.propose
    reweight    t < T:  log w_t = log sum_v p(v) psi(s_{1:t-1}, v) - log psi(s_{1:t-1})
                t = T:  log w_T = log p(s_T) + log phi(s_{1:T}) - log q_T(s_T) - log psi(s_{1:T-1})
    resample    ancestors from the weights gathered since the last resampling

so that the particles follow pi_t, proportional to p psi (eq. 4), and at T sigma (eq. 2). The evidence log Z-hat gains
log-mean-exp of the cumulative log weights whenever they are resampled; exp(log Z-hat) is an unbiased estimate of Z_sigma
under any resampling scheme and threshold (docs/method.md derives both).

Where this departs from the paper:
 1. The paper's weight at t = T sums p phi over all s_T, one potential for each token of the vocabulary. Here s_T is drawn
    from q_T like every other token, and the weight makes up for psi having stood in for phi.
 2. The paper resamples multinomially at every step. That is what `tsmc` does unless told otherwise; other schemes, and
    resampling only where the ESS is low or never before T, leave Z-hat unbiased.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.categorical import uniforms
from tsmc.interfaces import LanguageModel, LogPotential, Observer, Twist
from tsmc.population import Population, follow
from tsmc.proposal import Extension, propose
from tsmc.resampling import Scheme, multinomial
from tsmc.weights import effective_sample_size, log_mean_exp, normalise


@dataclass(frozen=True)
class Sigma:
    """The target, proportional to p(s) phi(s) (eq. 2), as seen from one language model after one prompt."""

    model: LanguageModel
    log_potential: LogPotential


class Particles:
    """R runs of K particles on their way from t = 0 to T; the methods are the three steps."""

    def __init__(self, model: LanguageModel, log_potential: LogPotential, runs: int, particles: int):
        """All particles stand behind the prompt with weight one; InputError for sizes with which nothing can be sampled."""
        if min(particles, runs, model.length) < 1:
            sizes = f"{runs} runs of {particles} particles with {model.length} tokens"
            raise InputError(f"{sizes} cannot be sampled; give particles, runs and length of at least 1")
        self.decoder, self.log_potential, self.length = model.decoder(runs * particles), log_potential, model.length
        dtype, device = self.decoder.logits_of(slice(0, 1)).dtype, self.decoder.state_of.device
        self.tokens = torch.empty(runs, particles, 0, dtype=torch.long, device=device)  # [R, K, t]
        self.log_p = torch.zeros(runs, particles, dtype=dtype, device=device)  # [R, K] log p(s_{1:t})
        self.log_psi = torch.zeros_like(self.log_p)  # [R, K] log psi(s_{1:t})
        self.log_weights = torch.zeros_like(self.log_p)  # [R, K] gathered since the last resampling
        self.log_z = self.log_p.new_zeros(runs)  # [R]

    def extend(self, step: Extension) -> None:
        """1. Every particle takes the token that was proposed for it; the fields of `step` are [R K]."""
        self.step = step.view(self.log_p.shape)
        self.tokens = torch.cat([self.tokens, self.step.tokens[..., None]], -1)
        self.log_p = self.log_p + self.step.log_p

    def is_complete(self) -> bool:
        """Whether t = T."""
        return self.tokens.shape[-1] == self.length

    def reweight(self) -> None:
        """2. log w_t, so that weights follow pi_t (eq. 4): normaliser of q_t over psi(s_{1:t-1}); at T phi replaces psi."""
        if self.is_complete():
            self.log_phi = self.log_potential(self.tokens.flatten(0, 1), self.log_p.flatten()).view_as(self.log_p)
            self.log_w = self.step.log_p + self.log_phi - self.step.log_q - self.log_psi
        else:
            self.log_w = self.step.log_normaliser - self.log_psi
        self.log_psi = self.step.log_psi
        self.log_weights = self.log_weights + self.log_w
        self.ess = effective_sample_size(self.log_weights)  # [R]

    def is_due(self, ess_threshold: float) -> Tensor:
        """Whether a run resamples now [R]; at t = T all do. InputError for a threshold that is no share of K."""
        if not 0 <= ess_threshold <= 1:
            raise InputError(f"an ESS threshold of {ess_threshold} is no share of K; give a number from 0 to 1")
        below = self.ess < ess_threshold * self.log_p.shape[1]
        return below | (ess_threshold == 1) | self.is_complete()

    def draw_ancestors(self, is_due: Tensor, resample: Scheme, generator: torch.Generator) -> Tensor:
        """Ancestors [R, K] by the weights in the runs that are due [R]; the particles themselves in the others."""
        runs, particles = self.log_weights.shape
        themselves = torch.arange(particles, device=self.log_weights.device).expand(runs, particles)
        if not is_due.any():
            return themselves
        return torch.where(is_due[:, None], resample(normalise(self.log_weights), generator), themselves)

    def resample(self, is_due: Tensor, ancestors: Tensor) -> None:
        """3. Particle k becomes its ancestor [R, K], whose weight turns into evidence; at t = T `Population` does the rest."""
        self.log_z = torch.where(is_due, self.log_z + log_mean_exp(self.log_weights), self.log_z)
        if self.is_complete():
            return
        self.log_weights = torch.where(is_due[:, None], 0.0, self.log_weights)
        self.tokens = follow(ancestors, self.tokens)
        self.log_p, self.log_psi = follow(ancestors, self.log_p), follow(ancestors, self.log_psi)
        first_rows = ancestors.shape[1] * torch.arange(len(ancestors), device=ancestors.device)[:, None]  # [R, 1]
        self.decoder.extend(self.tokens[..., -1].flatten(), (first_rows + ancestors).flatten())

    def population(self, ancestors: Tensor) -> Population:
        """The particles at t = T; InputError where a weight came out NaN or infinite."""
        if not bool((self.log_z < torch.inf).all()):
            raise InputError("log Z-hat is NaN or infinite: check that log phi and the twist's outputs are never NaN")
        samples = follow(ancestors, self.tokens)
        return Population(self.tokens, self.log_phi, self.log_weights, ancestors, samples, self.log_z, self.ess)


@torch.no_grad()
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
) -> Population:
    """R = runs independent populations of K = particles sequences.

    A run resamples where its ESS is under ess_threshold * K: at every step for 1 (the paper), never for 0. The final
    resampling is always drawn; `Population` keeps the weights it was drawn from. InputError for options out of range and
    where a weight came out NaN or infinite.
    """
    cloud = Particles(model, log_potential, runs, particles)
    for _ in range(model.length):
        cloud.extend(propose(cloud.decoder, twist, uniforms(runs * particles, 1, generator)))
        cloud.reweight()
        is_due = cloud.is_due(ess_threshold)
        ancestors = cloud.draw_ancestors(is_due, resample, generator)
        if observer is not None:
            observer(cloud, ancestors)
        cloud.resample(is_due, ancestors)
    return cloud.population(ancestors)
