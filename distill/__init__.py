"""Algorithm 1's two learners, and the baselines DPO and GRPO, by full fine-tuning or LoRA."""

from distill.pooled import Pooled, PooledOptions
from distill.published import Published, PublishedOptions
from tsmc.runs import Phases

__all__ = ["Phases", "Pooled", "PooledOptions", "Published", "PublishedOptions"]
