"""What is ours and not the paper's: other learners, forced draws, and the study of docs/results."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in main.py
