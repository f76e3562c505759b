"""What is made with the method: runs of it, their scores, the study, pages, benchmarks, the training of the checkpoints."""

import tinystories.interrupts  # noqa: F401 (before torch)
from eval.run.trained import load_run

__all__ = ["load_run"]
