"""The twist psi: its network, contrastive twist learning, and the potential that it predicts."""

from twist.ctl import Batch, ctl_loss, draw_batch
from twist.mlp import TwistMLP
from twist.potential import TextPotential

__all__ = ["Batch", "TextPotential", "TwistMLP", "ctl_loss", "draw_batch"]
