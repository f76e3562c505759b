"""The learners of Algorithm 1: the paper's, the pooled one, and the baselines DPO and GRPO."""

from distill.dpo import DPO
from distill.finetune import BaselineOptions
from distill.grpo import GRPO
from distill.learner import Learner
from distill.paper import WEIGHTED, Paper, PaperOptions
from distill.pooled import Pooled, PooledOptions
from tsmc.runs import Streams

__all__ = ["DPO", "GRPO", "WEIGHTED", "BaselineOptions", "Learner", "Paper", "PaperOptions"]
__all__ += ["Pooled", "PooledOptions", "Streams"]
