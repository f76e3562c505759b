"""What is made with the method: runs, tables, figures, samples.

A command, `python -m eval...` or main.py, imports this first. It says what is missing, and lets
threads of OpenMP that wait for each other sleep soon: by default they spin, which stops those that
work on a busy machine. Imported by another program, it leaves everything as it is.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "matplotlib", "tqdm", "filelock")

if sys.argv[0] == "-m" or Path(sys.argv[0]).resolve() == Path(__file__).parents[1] / "main.py":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is quiet while the libraries load
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing or sys.version_info < (3, 11):
        what = ", ".join(missing) or "Python 3.11 or newer"
        remedy = "activate the virtual environment, or run `pip install -r requirements.txt`"
        print(f"error: {what} is missing; {remedy}", file=sys.stderr)
        sys.exit(2)
    soon = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # GNU's turns, others' milliseconds
    if not {*soon, "OMP_WAIT_POLICY", "OMP_NUM_THREADS"} & os.environ.keys():  # the user's choice
        os.environ |= soon  # OpenMP reads them when torch is loaded
