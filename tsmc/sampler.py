"""Twisted SMC: s_{1:T} ~ TSMC(p, psi), R independent runs of K particles, N = R K rows in a batch.

For t = 1..T, with log psi(s_{1:0}) = 0:
    extend      s_t ~ q_t
    reweight    t < T:  log w_t = log sum_v p(v) psi(s_{1:t-1}, v) - log psi(s_{1:t-1})
                t = T:  log w_T = log p(s_T) + log phi(s_{1:T}) - log q_T(s_T) - log psi(s_{1:T-1})
    resample    ancestors from the weights gathered since the last resampling

A potential that says something about beginnings has a prefix part f_t(s_{1:t}), with which psi f_t
takes the place of psi in every weight but not in q_t: log w_t gains log f_t - log f_{t-1}, and f_0
= f_T = 1. f must be positive wherever a continuation has phi > 0.

The particles then follow pi_t, proportional to p psi f_t (eq. 4), and at T sigma (eq. 2). Whenever
the cumulative log weights are resampled, log Z-hat gains their log-mean-exp. Z-hat is an unbiased
estimate of Z_sigma under any scheme and threshold (docs/method.md derives both).

The paper's weight at t = T sums p phi over all s_T; here s_T is drawn from q_T like every other
token, and the weight corrects for it. The paper resamples at every step, here the caller decides.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tsmc.draws import Scheme, effective_sample_size, log_mean_exp, multinomial, normalise, uniforms
from tsmc.proposal import Twist, extend, wait
from tsmc.sigma import Sigma, call_potential

EARLY = 0.5  # ESS / K below which a run with a prefix part resamples


@dataclass(frozen=True)
class Rule:
    """How a run resamples at T, and before T where ESS / K is below the threshold."""

    resample: Scheme = multinomial
    ess_threshold: float = 1.0  # 1: at every step, as in the paper; 0: at T alone

    def __post_init__(self):
        if not 0 <= self.ess_threshold <= 1:
            raise ValueError(f"the threshold is {self.ess_threshold}; give a number from 0 to 1")


def threshold_of(sigma: Sigma, rule: Rule) -> float:
    """ESS / K below which a run resamples before T; 0 where its particles are independent.

    With a prefix part, which tells good beginnings from bad ones early, it is at least EARLY.
    """
    return rule.ess_threshold if sigma.log_prefix is None else max(rule.ess_threshold, EARLY)


@dataclass
class Population:
    """R runs of K particles at t = T: a weighted set, and samples of equal weight."""

    tokens: Tensor  # [R, K, T]
    log_phi: Tensor  # [R, K] of phi^(m) as this model sees it: log p + log phi is log p^(0) phi
    log_weights: Tensor  # [R, K] gathered since the last resampling before t = T
    ancestors: Tensor  # [R, K] of the final resampling
    samples: Tensor  # [R, K, T] of equal weight: resampled at t = T
    log_z: Tensor  # [R] log Z-hat of each run
    ess: Tensor  # [R] effective sample size of log_weights

    def is_alive(self) -> Tensor:
        """Whether some particle of a run has a weight above zero [R]."""
        return self.log_z > -torch.inf

    def alive(self) -> "Population":
        return Population(**{name: value[self.is_alive()] for name, value in vars(self).items()})

    def shares(self) -> Tensor:
        """Each particle's share of the weight of all runs [R, K] float64; zeros if all are dead."""
        runs = normalise(self.log_z.cpu().double())  # [R]
        particles = normalise(self.log_weights.cpu().double())  # [R, K]
        return runs[:, None] * particles * self.is_alive().cpu()[:, None]

    def log_mean_z(self) -> float:
        """log of the mean of Z-hat over the runs, dead ones counting zero."""
        return log_mean_exp(self.log_z.cpu().double()).item()


@dataclass
class Step:
    """What a trace holds of step t, before its resampling takes effect."""

    tokens: Tensor  # [R, K] s_t
    log_psi: Tensor  # [R, K]
    log_w: Tensor  # [R, K] incremental weights of this step
    log_weights: Tensor  # [R, K]
    ess: Tensor  # [R]
    log_z: Tensor  # [R] log Z-hat as if every run resampled now; at t = T the population's
    ancestors: Tensor  # [R, K]


@dataclass
class Particles:
    """Everything of N = R K particles that resampling copies."""

    tokens: Tensor  # [N, t]
    log_p: Tensor  # [N] log p(s_{1:t})
    log_psi: Tensor  # [N] log psi(s_{1:t})
    log_f: Tensor  # [N] log f_t(s_{1:t}) of a prefix part

    def take(self, parents: Tensor) -> "Particles":
        """Particle n becomes a copy of parents[n]; parents [N]."""
        return Particles(**{name: value[parents] for name, value in vars(self).items()})


@torch.no_grad()
def tsmc(
    sigma: Sigma,
    twist: Twist | None,
    particles: int,
    generator: torch.Generator,
    runs: int = 1,
    rule: Rule = Rule(),
    trace: list[Step] | None = None,
) -> Population:
    """R = runs independent runs of K = particles sequences of p = sigma.model.

    Every step is appended to `trace`, from which `lineages` follow. ValueError for NaN or infinite
    weights.
    """
    model = sigma.model
    ess_threshold = threshold_of(sigma, rule)
    assert min(runs, particles, model.length) >= 1, "give at least one run, particle and token"
    decoder = model.decoder(runs * particles)  # writes N texts token by token
    # In the type of the logits, which may be narrower than what the potential returns.
    zeros = model.head(decoder.hidden[:1]).new_zeros(runs * particles)  # [N]
    own = Particles(zeros.new_empty(len(zeros), 0, dtype=torch.long), zeros, zeros, zeros)
    log_phi = zeros  # [N], known at t = T
    log_weights = zeros.view(runs, particles)  # [R, K]
    log_z = zeros.new_zeros(runs)  # [R]
    identity = torch.arange(particles, device=zeros.device).repeat(runs, 1)  # [R, K]
    start = particles * torch.arange(runs, device=zeros.device)[:, None]  # [R, 1] of each run
    for t in range(model.length):
        is_last = t == model.length - 1
        # 1. extend
        step = extend(model, decoder, twist, uniforms(runs * particles, 1, generator))
        if t > 0:
            # Finished texts repeat their end, which changes no weight.
            step = wait(step, own.tokens[:, -1], own.log_psi, model.end)
        before = own
        tokens = torch.cat([before.tokens, step.tokens[:, None]], 1)  # [N, t]
        own = Particles(tokens, before.log_p + step.log_p, step.log_psi, zeros)
        # 2. reweight
        if is_last:
            log_phi = call_potential(sigma.log_potential, own.tokens, own.log_p)
            # phi takes the place of psi, with which the token was drawn, so nothing cancels.
            log_w = step.log_p + log_phi - step.log_q - before.log_psi  # [N]
        else:
            # p psi / q_t is the normaliser, whichever token was drawn.
            log_w = step.log_normaliser - before.log_psi
        # f_{t-1} came in one step ago; divided out here, only the latest f stays in the weight.
        log_w = log_w - before.log_f
        if sigma.log_prefix is not None and not is_last:
            log_f = call_potential(sigma.log_prefix, own.tokens)  # [N]
            log_w = log_w + log_f
            own.log_f = log_f.masked_fill(log_f == -torch.inf, 0.0)  # else -inf - (-inf) next
        log_w = log_w.view(runs, particles)
        log_weights = log_weights + log_w  # [R, K]
        ess = effective_sample_size(log_weights)  # [R]
        # A run that does not resample carries its weights on, and its evidence is not lost.
        evidence = log_z + log_mean_exp(log_weights)  # [R]
        # 3. resample. Rounding can make the ESS of equal weights K or more: hence `== 1`.
        is_always = is_last or ess_threshold == 1
        is_due = (ess < ess_threshold * particles) | is_always  # [R]
        ancestors = identity  # [R, K]
        # `any` waits for a GPU, so it comes last.
        if is_always or (ess_threshold > 0 and is_due.any()):
            drawn = rule.resample(normalise(log_weights), generator)
            ancestors = torch.where(is_due[:, None], drawn, identity)
        if trace is not None:
            numbers = (step.log_psi.view_as(log_w), log_w, log_weights, ess, evidence)
            trace.append(Step(step.tokens.view_as(log_w), *numbers, ancestors))
        log_z = torch.where(is_due, evidence, log_z)
        parents = (start + ancestors).flatten()  # [N]
        # At T nothing is reordered: the particles are also returned as a weighted set.
        if not is_last:
            log_weights = torch.where(is_due[:, None], 0.0, log_weights)
            own = own.take(parents)
            decoder.append(own.tokens[:, -1], parents)
    if not bool((log_z < torch.inf).all()):
        raise ValueError("log Z-hat is NaN or infinite; check log phi and log psi for NaN")
    tokens = own.tokens.view(runs, particles, -1)
    samples = own.take(parents).tokens.view_as(tokens)
    log_phi = log_phi.view(runs, particles)
    return Population(tokens, log_phi, log_weights, ancestors, samples, log_z, ess)


def lineages(trace: list[Step]) -> Tensor:
    """Which particle of step t each final sample descends from [T, R, K].

    Where one particle of step t has all descendants, all K samples share their first t tokens.
    """
    lines = [trace[-1].ancestors]  # from T backwards, each [R, K]
    for step in reversed(trace[:-1]):
        lines.append(step.ancestors.gather(1, lines[-1]))
    return torch.stack(lines[::-1])
