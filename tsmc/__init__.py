"""Twisted sequential Monte Carlo: proposal, sampler, resampling, exact samples, exact answers."""

from tsmc.exact import Target
from tsmc.proposal import proposal_log_probs, sample_proposal
from tsmc.rejection import ExactSamples
from tsmc.resampling import SCHEMES
from tsmc.runs import Streams
from tsmc.sampler import Population, Sigma, tsmc
from tsmc.trace import Trace

__all__ = ["SCHEMES", "ExactSamples", "Population", "Sigma", "Streams", "Target", "Trace"]
__all__ += ["proposal_log_probs", "sample_proposal", "tsmc"]
