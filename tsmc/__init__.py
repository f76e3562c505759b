"""Twisted sequential Monte Carlo: proposal, sampler, resampling, exact samples, exact answers."""

from tsmc.draws import SCHEMES
from tsmc.exact import Target
from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.rejection import ExactSamples
from tsmc.sampler import Population, Rule, lineages, tsmc
from tsmc.sigma import Sigma
from tsmc.streams import Streams

__all__ = [
    "SCHEMES",
    "ExactSamples",
    "Population",
    "Rule",
    "Sigma",
    "Streams",
    "Target",
    "lineages",
]
__all__ += ["proposal_log_probs", "sample_proposal", "tsmc"]
