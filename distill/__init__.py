"""Self-distillation by full fine-tuning or LoRA."""

from distill.self_distill import DistillConfig, self_distill

__all__ = ["DistillConfig", "self_distill"]
