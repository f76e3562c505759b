"""`python -m tsmc RUN [PROMPT]`: samples of a trained pair, a shorter name for `eval.viewer`."""

import runpy

runpy.run_module("eval.viewer", run_name="__main__", alter_sys=True)
