"""Self-distillation, and the baselines DPO and GRPO, by full fine-tuning or LoRA."""

from distill.batches import batches_of, held_out_loss, hold_out
from distill.dpo import DPO_GRID, dpo, dpo_cost
from distill.finetune import BaselineConfig, Cost, Grid, Student
from distill.grpo import GRPO_GRID, grpo, grpo_cost
from distill.self_distill import self_distill

__all__ = [
    "DPO_GRID",
    "GRPO_GRID",
    "BaselineConfig",
    "Cost",
    "Grid",
    "Student",
    "batches_of",
    "dpo",
    "dpo_cost",
    "grpo",
    "grpo_cost",
    "held_out_loss",
    "hold_out",
    "self_distill",
]
