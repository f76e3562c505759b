"""What is made with the method: runs, scores, the study, pages, benchmarks, pocket checkpoints."""

from eval.trained import TrainedRun as load_run

__all__ = ["load_run"]
