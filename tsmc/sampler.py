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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.decoder import Conditional
from tsmc.draws import Scheme, effective_sample_size, log_mean_exp, multinomial, normalise, uniforms
from tsmc.proposal import Twist, extend, wait

EARLY = 0.5  # ESS / K below which a run with a prefix part resamples
LogPotential = Callable[[Tensor, Tensor], Tensor]
"""log_potential(tokens [N, T], log_p [N]) -> log phi [N].

log_p = log p(s_{1:T}) is passed because effective potentials divide by it (eq. 8).
"""
LogPrefix = Callable[[Tensor], Tensor]
"""log_prefix(tokens [N, t]) -> log f_t [N] of unfinished sequences, t < T; None means f = 1."""


def call_potential(log_phi: Callable[..., Tensor], tokens: Tensor, *log_p: Tensor) -> Tensor:
    """log phi [N] of tokens [N, T], given as a copy, and of log_p [N] where it is given.

    ValueError for NaN and infinity, else the best text in one place and the worst in another.
    """
    values = log_phi(tokens.clone(), *log_p)
    assert values.shape == tokens.shape[:1], "log phi must be a tensor with a number for each text"
    assert values.dtype.is_floating_point, "log phi must be floating-point: 0 for true, else -inf"
    if not bool((values < torch.inf).all()):
        raise ValueError("log phi is NaN or infinite on some text; return numbers below infinity")
    return values


@dataclass(frozen=True)
class Sigma:
    """The target, proportional to p(s) phi(s) (eq. 2), as seen from one language model."""

    model: Conditional
    log_potential: LogPotential
    log_prefix: LogPrefix | None = None  # log f_t of beginnings


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
        """The runs that are alive."""
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


@torch.no_grad()
def tsmc(
    model: Conditional,
    twist: Twist | None,
    log_potential: LogPotential,
    particles: int,
    generator: torch.Generator,
    runs: int = 1,
    resample: Scheme = multinomial,
    ess_threshold: float = 1.0,
    log_prefix: LogPrefix | None = None,
    trace: list[Step] | None = None,
) -> Population:
    """R = runs independent populations of K = particles sequences.

    A run resamples at T and where its ESS is below ess_threshold * K: at every step for 1, as in
    the paper. With a prefix part, which tells good beginnings from bad ones early, the threshold is
    at least EARLY. Every step is appended to `trace`, from which `lineages` follow. ValueError for
    NaN or infinite weights.
    """
    if log_prefix is not None:
        ess_threshold = max(ess_threshold, EARLY)
    assert min(runs, particles, model.length) >= 1 and 0 <= ess_threshold <= 1, "give a share"
    decoder = model.decoder(runs * particles)
    # In the type of the logits, which may be narrower than what the potential returns.
    log_p = model.head(decoder.hidden[:1]).new_zeros(runs, particles)  # [R, K] log p(s_{1:t})
    log_psi = torch.zeros_like(log_p)  # [R, K] log psi(s_{1:t})
    log_f = torch.zeros_like(log_p)  # [R, K] log f_t(s_{1:t}) of a prefix part
    log_phi: Tensor | None = None  # [R K] known at t = T
    log_weights = torch.zeros_like(log_p)  # [R, K]
    log_z = log_p.new_zeros(runs)  # [R]
    tokens = log_p.new_empty(runs, particles, 0, dtype=torch.long)  # [R, K, t]
    run = torch.arange(runs, device=log_p.device)[:, None]  # [R, 1]
    identity = torch.arange(particles, device=log_p.device).repeat(runs, 1)  # [R, K]
    # Everything that a particle owns is reordered below; whoever adds something adds it there too.
    for t in range(model.length):
        is_last = t == model.length - 1
        # 1. extend
        step = extend(model, decoder, twist, uniforms(runs * particles, 1, generator))
        if t > 0:
            step = wait(step, tokens[..., -1].flatten(), log_psi.flatten(), model.end)  # all [R K]
        tokens = torch.cat([tokens, step.tokens.view(runs, particles, 1)], -1)
        log_p = log_p + step.log_p.view_as(log_p)
        # 2. reweight
        rows = tokens.flatten(0, 1)  # [R K, t]
        if is_last:
            log_phi = call_potential(log_potential, rows, log_p.flatten())
            # phi takes the place of psi, with which the token was drawn: nothing cancels (D1).
            log_w = step.log_p + log_phi - step.log_q - log_psi.flatten()
        else:
            # p psi / q_t is the normaliser, whichever token was drawn.
            log_w = step.log_normaliser - log_psi.flatten()
        # f_{t-1} came in one step ago; divided out here, only the latest f stays in the weight.
        log_w = log_w.view_as(log_p) - log_f  # [R, K]
        log_psi = step.log_psi.view_as(log_p)
        if log_prefix is not None and not is_last:
            log_f = call_potential(log_prefix, rows).view_as(log_p)
            log_w = log_w + log_f
            log_f = log_f.masked_fill(log_f == -torch.inf, 0.0)  # else -inf - (-inf) next
        log_weights = log_weights + log_w
        ess = effective_sample_size(log_weights)  # [R]
        # A run that does not resample carries its weights on, and its evidence is not lost.
        evidence = log_z + log_mean_exp(log_weights)  # [R]
        # 3. resample. Rounding can make the ESS of equal weights K or more: hence `== 1`.
        is_due = (ess < ess_threshold * particles) | (ess_threshold == 1) | is_last  # [R]
        ancestors = identity  # [R, K]
        if is_due.any():
            drawn = resample(normalise(log_weights), generator)
            ancestors = torch.where(is_due[:, None], drawn, identity)
        if trace is not None:
            numbers = (log_psi, log_w, log_weights, ess, evidence)
            trace.append(Step(tokens[..., -1], *numbers, ancestors))
        log_z = torch.where(is_due, evidence, log_z)
        # At T nothing is reordered: the particles are also returned as a weighted set.
        if not is_last:
            log_weights = torch.where(is_due[:, None], 0.0, log_weights)
            tokens = tokens[run, ancestors]
            log_p = log_p[run, ancestors]
            log_psi = log_psi[run, ancestors]
            log_f = log_f[run, ancestors]
            decoder.append(tokens[..., -1].flatten(), (particles * run + ancestors).flatten())
    if not bool((log_z < torch.inf).all()):
        raise ValueError("log Z-hat is NaN or infinite; check log phi and log psi for NaN")
    samples = tokens[run, ancestors]
    assert log_phi is not None  # there was a last step
    log_phi = log_phi.view_as(log_p)
    return Population(tokens, log_phi, log_weights, ancestors, samples, log_z, ess)


def lineages(trace: list[Step]) -> Tensor:
    """Which particle of step t each final sample descends from [T, R, K].

    Where one particle of step t has all descendants, all K samples share their first t tokens.
    """
    lines = [trace[-1].ancestors]  # from T backwards, each [R, K]
    for step in reversed(trace[:-1]):
        lines.append(step.ancestors.gather(1, lines[-1]))
    return torch.stack(lines[::-1])
