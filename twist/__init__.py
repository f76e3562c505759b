"""The twist: potentials, networks, contrastive twist learning, the pool, saved pairs, samples."""

from twist.ctl import Batch, ctl_loss, draw_batch
from twist.drawn import Drawn, sample
from twist.mlp import TwistMLP
from twist.pair import Pair, load_pair, save_pair
from twist.potential import TextPotential

__all__ = ["Batch", "Drawn", "Pair", "TextPotential", "TwistMLP", "ctl_loss", "draw_batch"]
__all__ += ["load_pair", "sample", "save_pair"]
