"""The twist: potential and effective potential, the MLP, contrastive twist learning, saving and loading."""

from twist.checkpoint import load_twist, save_twist
from twist.ctl import CTLConfig, learn_twist
from twist.mlp import TwistMLP
from twist.potential import TextPotential, base_potential, effective_potential
from twist.potentials import first_sentence, keyword, power, regex

__all__ = [
    "CTLConfig",
    "TextPotential",
    "TwistMLP",
    "base_potential",
    "effective_potential",
    "first_sentence",
    "keyword",
    "learn_twist",
    "load_twist",
    "power",
    "regex",
    "save_twist",
]
