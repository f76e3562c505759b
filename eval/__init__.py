"""What is made with the method: runs of it, their scores, the study, pages, benchmarks, the training of the checkpoints."""
