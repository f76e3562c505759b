"""Twisted SMC: s_{1:T} ~ TSMC(p, psi), R independent runs of K particles, N = R K rows in a batch.

For t = 1..T, with log psi(s_{1:0}) = 0:
    extend      s_t ~ q_t
    reweight    t < T:  log w_t = log sum_v p(v) psi(s_{1:t-1}, v) - log psi(s_{1:t-1})
                t = T:  log w_T = log p(s_T) + log phi(s_{1:T}) - log q_T(s_T) - log psi(s_{1:T-1})
    resample    ancestors from the weights gathered since the last resampling

With a prefix part f_t(s_{1:t}) of the potential, particles carry psi f_t in place of psi, while q_t
stays as it is: log w_t gains log f_t - log f_{t-1}, and f_0 = f_T = 1, f > 0 where a continuation
has phi > 0. Particles then follow pi_t, proportional to p psi f_t (eq. 4), and at T sigma (eq. 2).
With every resampling log Z-hat gains the log-mean-exp of the weights; Z-hat is unbiased under any
scheme and threshold. The paper's weight at T sums p phi over all s_T; here s_T is drawn as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.decoder import Decoder
from tsmc.draws import Scheme, effective_sample_size, log_mean_exp, multinomial, normalise, uniforms
from tsmc.proposal import Twist, extend
from tsmc.sigma import Sigma

EARLY = 0.5  # ESS / K below which a run with a prefix part resamples


@dataclass(frozen=True)
class Rule:
    """How a run resamples at T, and before T where ESS / K is below the threshold."""

    resample: Scheme = multinomial
    ess_threshold: float = 1.0  # 1: at every step, as in the paper; 0: at T alone

    def threshold(self, sigma: Sigma) -> float:
        """ESS / K below which a run resamples before T: at least EARLY with a prefix part."""
        return max(self.ess_threshold, EARLY if sigma.log_prefix else 0.0)


@dataclass
class Population:
    """R runs of K particles at t = T: a weighted set, and samples of equal weight."""

    tokens: Tensor  # [R, K, T]
    log_weights: Tensor  # [R, K] gathered since the last resampling before t = T
    ancestors: Tensor  # [R, K] of the final resampling
    samples: Tensor  # [R, K, T] of equal weight: resampled at t = T
    log_z: Tensor  # [R] log Z-hat of each run
    ess: Tensor  # [R] effective sample size of log_weights

    def alive(self) -> "Population":
        """The runs in which some particle has a weight above zero."""
        is_alive = self.log_z > -torch.inf  # [R]
        return Population(**{name: value[is_alive] for name, value in vars(self).items()})


@torch.no_grad()
def tsmc(
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    generator: torch.Generator,
    runs: int = 1,
    rule: Rule = Rule(),
) -> Population:
    """R independent runs of K particles of sigma.model; ValueError for NaN or infinite weights."""
    model = sigma.model
    threshold, log_prefix = rule.threshold(sigma), sigma.log_prefix
    decoder = Decoder(model, runs * particles)  # writes N texts token by token
    # In the type of the logits, which may be narrower than what the potential returns.
    log_p = log_psi = zeros = model.head(decoder.hidden[:1]).new_zeros(runs * particles)  # [N]
    samples = zeros.new_empty(len(zeros), 0, dtype=torch.long)  # [N, t] after resampling
    log_weights = zeros.view(runs, particles)  # [R, K]
    log_z = zeros.new_zeros(runs)  # [R]
    identity = torch.arange(particles, device=zeros.device).repeat(runs, 1)  # [R, K]
    start = particles * torch.arange(runs, device=zeros.device)[:, None]  # [R, 1] of each run
    for t in range(model.length):
        is_last = t == model.length - 1
        # 1. extend
        step = extend(model, decoder, twist, uniforms(runs * particles, 1, generator))
        tokens = torch.cat([samples, step.tokens[:, None]], 1)  # [N, t]
        log_p = log_p + step.log_p  # [N] log p(s_{1:t})
        # 2. reweight
        if is_last:
            # phi takes the place of psi, with which the token was drawn, so nothing cancels.
            log_phi = sigma.log_potential(tokens, log_p)  # [N]
            log_w = step.log_p + log_phi - step.log_q - log_psi  # [N]
        else:
            # p psi / q_t is the normaliser, whichever token was drawn.
            log_w = step.log_normaliser - log_psi
        log_psi = step.log_psi  # [N] of s_{1:t}
        if log_prefix and not is_last:
            log_f = log_prefix(tokens)  # [N]
            log_w = log_w + log_f
            # A particle with f = 0 has no weight from here on; -inf would give NaN in step t + 1.
            log_psi = log_psi + log_f.masked_fill(log_f == -torch.inf, 0.0)
        log_weights = log_weights + log_w.view(runs, particles)  # [R, K]
        ess = effective_sample_size(log_weights)  # [R]
        # A run that does not resample carries its weights on, and its evidence is not lost.
        evidence = log_z + log_mean_exp(log_weights)  # [R]
        # 3. resample. Rounding can make the ESS of equal weights K or more: hence `== 1`.
        is_always = is_last or threshold == 1
        is_due = (ess < threshold * particles) | is_always  # [R]
        ancestors = identity  # [R, K]
        if is_always or (threshold > 0 and is_due.any()):
            drawn = rule.resample(normalise(log_weights), generator)
            ancestors = torch.where(is_due[:, None], drawn, identity)
        log_z = torch.where(is_due, evidence, log_z)
        parents = (start + ancestors).flatten()  # [N]
        samples = tokens[parents]  # [N, t]
        if not is_last:  # at T the weighted particles are returned beside the samples
            log_p, log_psi = log_p[parents], log_psi[parents]
            log_weights = torch.where(is_due[:, None], 0.0, log_weights)
            decoder.append(samples[:, -1], parents)
    if not bool((log_z < torch.inf).all()):
        raise ValueError("log Z-hat is NaN or infinite: check log phi and log psi")
    tokens, samples = (rows.view(runs, particles, -1) for rows in (tokens, samples))
    return Population(tokens, log_weights, ancestors, samples, log_z, ess)
