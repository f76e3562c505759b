"""The twist: potentials, networks, contrastive twist learning, the pool, saved pairs, samples."""

from twist.ctl import ctl_loss, draw_batch
from twist.drawn import Drawn, sample
from twist.mlp import TwistMLP
from twist.pair import Pair, load_pair, save_pair
from twist.potential import Factor, TextPotential

__all__ = ["Drawn", "Factor", "Pair", "TextPotential", "TwistMLP", "ctl_loss"]
__all__ += ["draw_batch", "load_pair", "sample", "save_pair"]
