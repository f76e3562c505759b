"""The twist: potentials, networks, contrastive twist learning, the pool, saved pairs, samples."""

from twist.ctl import batches_from_proposal, learn_twist, positive_log_weights
from twist.drawn import Drawn, sample
from twist.mlp import TwistMLP
from twist.pair import Pair, load_pair, save_pair
from twist.potential import Factor, TextPotential

__all__ = ["Drawn", "Factor", "Pair", "TextPotential", "TwistMLP", "batches_from_proposal"]
__all__ += ["learn_twist", "load_pair", "positive_log_weights", "sample", "save_pair"]
