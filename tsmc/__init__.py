"""Twisted sequential Monte Carlo: proposal, weights, resampling, the sampler, and exact sampling by rejection."""

from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.rejection import rejection_sample
from tsmc.resampling import SCHEMES
from tsmc.sampler import Population, tsmc

__all__ = ["SCHEMES", "Population", "proposal_log_probs", "rejection_sample", "sample_proposal", "tsmc"]
