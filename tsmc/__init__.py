"""Twisted sequential Monte Carlo: proposal, weights, resampling, the sampler, exact sampling by rejection, and the means to
check them: bounds on the evidence, traces, and exact answers for small worlds."""

from tinystories.errors import InputError
from tsmc.bounds import BoundsProblem, bidirectional_bounds
from tsmc.conditional import conditional_tsmc
from tsmc.exact import Target
from tsmc.moves import move
from tsmc.population import Population
from tsmc.rejection import ExactSamples, rejection_sample
from tsmc.resampling import SCHEMES
from tsmc.runs import sample_model, sample_runs
from tsmc.sampler import Sigma, tsmc
from tsmc.scoring import proposal_log_probs
from tsmc.steps import Chunks, Steps
from tsmc.table import TableModel, TableTwist
from tsmc.trace import Trace
from tsmc.trajectories import sample_proposal

__all__ = [
    "SCHEMES",
    "BoundsProblem",
    "Chunks",
    "ExactSamples",
    "InputError",
    "Population",
    "Sigma",
    "Steps",
    "TableModel",
    "TableTwist",
    "Target",
    "Trace",
    "bidirectional_bounds",
    "conditional_tsmc",
    "move",
    "proposal_log_probs",
    "rejection_sample",
    "sample_model",
    "sample_proposal",
    "sample_runs",
    "tsmc",
]
