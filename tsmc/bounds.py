"""Bidirectional bounds on log Z_sigma and on both divergences between proposal and target.

    E[log Z-hat] of TSMC                                                        <=  log Z_sigma
    E[log Z-hat] of conditional TSMC, each run given an exact sample of sigma    >=  log Z_sigma
    KL(q || sigma) = log Z_sigma - E_q[log w],   KL(sigma || q) = E_sigma[log w] - log Z_sigma
    w = p phi / q

Both bounds follow from Jensen's inequality: E[Z-hat] = Z_sigma and, in conditional runs, E[1 /
Z-hat] <= 1 / Z_sigma (Zhao et al. 2024, arXiv:2404.17546). Without resampling (ess_threshold 0)
they are those of importance sampling with K draws. Several conditional runs may start from each
exact sample; errors are computed over exact samples. A exact samples, R runs, K particles, T steps.
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
        options = {"ess_threshold": self.ess_threshold, "resample": self.resample}
        options["log_prefix"] = self.sigma.log_prefix
        log_z = []
        for rows in torch.arange(runs).split(max(1, self.max_rows // self.particles)):
            if reference is not None:
                options |= {"reference": reference[rows], "resample": multinomial}
            given = (self.sigma.model, self.twist, self.sigma.log_potential, self.particles)
            log_z.append(tsmc(*given, generator, len(rows), **options).log_z)
        return torch.cat(log_z)

    def log_weights_of(self, tokens: Tensor) -> Tensor:
        """log w [N] of given sequences tokens [N, T]."""
        log_p, log_q = proposal_log_probs(self.sigma.model, self.twist, tokens)
        return log_p + self.sigma.log_potential(tokens, log_p) - log_q


def bidirectional_bounds(
    problem: BoundsProblem,
    exact_samples: Tensor,
    runs: int,
    generator: torch.Generator,
    proposals: int = 1000,
) -> Bounds:
    """Bounds from R = runs TSMC runs, at least as many conditional ones, and draws of q.

    exact_samples [A, T] are independent draws of sigma; InputError where there is none.
    """
    count = len(exact_samples)
    if count == 0:
        raise InputError("the upper bound needs an exact sample of sigma; draw more proposals")
    lower = problem.log_evidence(runs, generator)  # [R]
    repeats = -(-runs // count)
    references = exact_samples.repeat_interleave(repeats, 0)
    upper = problem.log_evidence(len(references), generator, references)
    upper = upper.view(count, repeats).mean(1)  # [A]
    low, high = mean_estimate(lower), mean_estimate(upper)
    drawn = sample_proposal(problem.sigma.model, problem.twist, proposals, generator).tokens
    log_w_q = mean_estimate(problem.log_weights_of(drawn))
    log_w_sigma = problem.log_weights_of(exact_samples)  # [A]
    paired = mean_estimate(log_w_sigma - upper)  # both vary with the exact sample
    return Bounds(
        log_z=Bracket(low, high),
        kl_from_proposal=Bracket(difference(low, log_w_q), difference(high, log_w_q), floor=0.0),
        kl_from_target=Bracket(paired, difference(mean_estimate(log_w_sigma), low), floor=0.0),
    )
