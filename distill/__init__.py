"""The learners of Algorithm 1: the paper's, the pooled one, and the baselines."""

from distill.dpo import DPO
from distill.finetune import BaselineOptions
from distill.grpo import GRPO, GRPOOptions
from distill.learner import Learner
from distill.paper import Paper, PaperOptions
from distill.pooled import Pooled, PooledOptions
from distill.rl import RL, RLOptions
from tsmc.streams import Streams

LEARNERS = {"paper": Paper, "pooled": Pooled, "dpo": DPO, "grpo": GRPO, "rl": RL}
"""Each learner by the name that --learner gives it."""

__all__ = ["DPO", "GRPO", "LEARNERS", "RL", "BaselineOptions", "GRPOOptions", "Learner", "Paper"]
__all__ += ["PaperOptions", "Pooled", "PooledOptions", "RLOptions", "Streams"]
