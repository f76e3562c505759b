"""The twist: potential and effective potential, the MLP, contrastive twist learning."""

from twist.ctl import batches_from_proposal, learn_twist
from twist.embedding import EmbeddingTwist
from twist.factors import Factor, TextPotential, first_sentence, keyword, power, regex
from twist.mlp import TwistMLP
from twist.pool import Pool, batches_from_pools, draw_round, learn_twist_from_pools
from twist.potential import base_potential, effective_potential

__all__ = [
    "EmbeddingTwist",
    "Factor",
    "Pool",
    "TextPotential",
    "TwistMLP",
    "base_potential",
    "batches_from_pools",
    "batches_from_proposal",
    "draw_round",
    "effective_potential",
    "first_sentence",
    "keyword",
    "learn_twist",
    "learn_twist_from_pools",
    "power",
    "regex",
]
