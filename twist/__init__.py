"""The twist: potential and effective potential, the MLP, contrastive twist learning."""

from twist.ctl import batches_from_proposal, learn_twist
from twist.factors import first_sentence, keyword, power, regex
from twist.mlp import TwistMLP
from twist.potential import Factor, TextPotential, base_potential, effective_potential

__all__ = [
    "Factor",
    "TextPotential",
    "TwistMLP",
    "base_potential",
    "batches_from_proposal",
    "effective_potential",
    "first_sentence",
    "keyword",
    "learn_twist",
    "power",
    "regex",
]
