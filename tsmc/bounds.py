"""Bidirectional bounds on log Z_sigma and on both divergences between proposal and target.

    E[log Z-hat] of TSMC                                                        <=  log Z_sigma
    E[log Z-hat] of conditional TSMC, each run given an exact sample of sigma    >=  log Z_sigma
    KL(q || sigma) = log Z_sigma - E_q[log w],   KL(sigma || q) = E_sigma[log w] - log Z_sigma
    w = p phi / q

Both bounds follow from Jensen's inequality: E[Z-hat] = Z_sigma and, in conditional runs, E[1 /
Z-hat] <= 1 / Z_sigma, with equality where no unconditional run can die (Zhao et al. 2024,
arXiv:2404.17546). The same two expectations without resampling (ess_threshold 0) are the bounds of
importance sampling with K draws. Here q is the product of the proposal's factors, without
resampling.

Few exact samples are enough: several conditional runs may start from each, and errors are computed
over exact samples, not over runs. A exact samples, R runs, K particles, T steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinystories.errors import InputError
from tsmc.estimate import Bracket, difference, mean_estimate
from tsmc.interfaces import Twist
from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.resampling import Scheme, multinomial
from tsmc.sampler import Sigma, tsmc


@dataclass(frozen=True)
class Bounds:
    """Brackets of the evidence and of both divergences."""

    log_z: Bracket
    kl_from_proposal: Bracket  # KL(q || sigma)
    kl_from_target: Bracket  # KL(sigma || q)

    @property
    def gap(self) -> float:
        """Upper minus lower bound on log Z_sigma: zero for a perfect sampler."""
        return self.log_z.upper.value - self.log_z.lower.value


@dataclass(frozen=True)
class BoundsProblem:
    """Proposal and target, how runs resample, and how many sequences fit in memory at once."""

    sigma: Sigma
    twist: Twist | None
    particles: int
    ess_threshold: float = 1.0
    resample: Scheme = multinomial
    max_rows: int = 4096

    def log_evidence(
        self, runs: int, generator: torch.Generator, reference: Tensor | None = None
    ) -> Tensor:
        """log Z-hat [R] of R = runs runs, conditional ones where each has a reference [R, T]."""
        resample = self.resample if reference is None else multinomial
        log_z = []
        for rows in torch.arange(runs).split(max(1, self.max_rows // self.particles)):
            population = tsmc(
                self.sigma.model,
                self.twist,
                self.sigma.log_potential,
                self.particles,
                generator,
                len(rows),
                resample,
                self.ess_threshold,
                reference=None if reference is None else reference[rows],
            )
            log_z.append(population.log_z)
        return torch.cat(log_z)

    def log_weights_of(self, tokens: Tensor) -> Tensor:
        """log w [N] of given sequences tokens [N, T]."""
        parts = []
        for rows in tokens.split(max(1, self.max_rows // self.sigma.model.length)):
            log_p, log_q = proposal_log_probs(self.sigma.model, self.twist, rows)
            parts.append(log_p + self.sigma.log_potential(rows, log_p) - log_q)
        return torch.cat(parts)


def bidirectional_bounds(
    problem: BoundsProblem,
    exact_samples: Tensor,
    runs: int,
    generator: torch.Generator,
    proposals: int = 1000,
) -> Bounds:
    """Bounds from R = runs TSMC runs, at least as many conditional ones, and draws of q.

    exact_samples [A, T] are independent draws of sigma (`tsmc.rejection`). With a single one the
    upper bound has a value but an infinite interval. InputError where there is none.
    """
    count = len(exact_samples)
    if count == 0:
        raise InputError("the upper bound needs an exact sample of sigma; draw more proposals")
    lower = problem.log_evidence(runs, generator)  # [R]
    repeats = -(-runs // count)
    references = exact_samples.repeat_interleave(repeats, 0)
    upper = problem.log_evidence(len(references), generator, references)
    upper = upper.view(count, repeats).mean(1)  # [A]
    log_w_target = problem.log_weights_of(exact_samples)  # [A]
    drawn = sample_proposal(problem.sigma.model, problem.twist, proposals, generator).tokens
    log_w_proposal = mean_estimate(problem.log_weights_of(drawn))
    low, high = mean_estimate(lower), mean_estimate(upper)
    return Bounds(
        log_z=Bracket(low, high),
        kl_from_proposal=Bracket(
            difference(low, log_w_proposal), difference(high, log_w_proposal), floor=0.0
        ),
        kl_from_target=Bracket(
            mean_estimate(log_w_target - upper),  # paired: both vary with the exact sample
            difference(mean_estimate(log_w_target), low),
            floor=0.0,
        ),
    )
