"""What is ours and not the paper's: other learners, forced draws, and the study of docs/results."""
