"""Self-distillation, and the baselines DPO and GRPO, by full fine-tuning or LoRA."""
