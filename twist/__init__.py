"""The twist: potential and effective potential, the MLP, contrastive twist learning, saving and loading."""

from twist.checkpoint import load_twist, save_twist
from twist.ctl import CTLConfig, learn_twist
from twist.mlp import TwistMLP
from twist.potential import TextPotential, base_potential, effective_potential

__all__ = [
    "CTLConfig",
    "TextPotential",
    "TwistMLP",
    "base_potential",
    "effective_potential",
    "learn_twist",
    "load_twist",
    "save_twist",
]
