"""`python -m tsmc`: samples of a trained pair, or of p; a shorter name for `eval.sample`."""

import importlib
import sys
from pathlib import Path

if not (Path(__file__).parents[1] / "eval" / "sample.py").exists():
    print("tsmc: error: samples are drawn in the repository; run this there", file=sys.stderr)
    sys.exit(2)
importlib.import_module("eval.sample").main()
