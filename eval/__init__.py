"""What is made with the method: runs, tables, figures, samples, the small checkpoints.

A command, started as `python -m eval...` or main.py, imports this first. It lets the threads of
OpenMP sleep soon when they wait for each other: by default they spin, which on a busy machine stops
the ones that work; OpenMP reads these variables when torch is loaded. Imported by another program,
it leaves the environment as it is.
"""

import os
import signal
import sys
from pathlib import Path

if sys.argv[0] == "-m" or Path(sys.argv[0]).resolve() == Path(__file__).parents[1] / "main.py":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is quiet while the libraries load
    soon = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # GNU's turns, others' milliseconds
    if not {*soon, "OMP_WAIT_POLICY", "OMP_NUM_THREADS"} & os.environ.keys():  # the user's choice
        os.environ |= soon
