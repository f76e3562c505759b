"""Self-distillation, and the baselines DPO and GRPO, by full fine-tuning or LoRA."""

from distill.dpo import DPO_GRID, dpo, dpo_cost
from distill.finetune import BaselineConfig, Cost, Grid
from distill.grpo import GRPO_GRID, grpo, grpo_cost
from distill.self_distill import DistillConfig, self_distill

__all__ = [
    "DPO_GRID",
    "GRPO_GRID",
    "BaselineConfig",
    "Cost",
    "DistillConfig",
    "Grid",
    "dpo",
    "dpo_cost",
    "grpo",
    "grpo_cost",
    "self_distill",
]
