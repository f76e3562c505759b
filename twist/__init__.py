"""The twist: potentials, networks, contrastive twist learning, the pool."""

from twist.ctl import batches_from_proposal, learn_twist, positive_log_weights
from twist.mlp import TwistMLP

__all__ = ["TwistMLP", "batches_from_proposal", "learn_twist", "positive_log_weights"]
