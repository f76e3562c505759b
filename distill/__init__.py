"""The learners of Algorithm 1: the paper's, the pooled one, and the baselines.

Beside them are the pairs (p^(m), psi^(m)) that they learn, and the weighted texts of a pair.
"""

from distill.baseline import BaselineOptions
from distill.dpo import DPO
from distill.grpo import GRPO, GRPOOptions
from distill.learner import Learner
from distill.pair import Pair, load_pair, save_pair
from distill.paper import Paper, PaperOptions
from distill.pooled.learner import Pooled, PooledOptions
from distill.rl import RL, RLOptions
from distill.weighted import Weighted, sample
from tsmc.streams import Streams

LEARNERS = {"paper": Paper, "pooled": Pooled, "dpo": DPO, "grpo": GRPO, "rl": RL}
"""Each learner by the name that --learner gives it."""

__all__ = ["DPO", "GRPO", "LEARNERS", "RL", "BaselineOptions", "GRPOOptions", "Learner", "Pair"]
__all__ += ["Paper", "PaperOptions", "Pooled", "PooledOptions", "RLOptions", "Streams", "Weighted"]
__all__ += ["load_pair", "sample", "save_pair"]
