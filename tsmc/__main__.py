"""`python -m tsmc RUN [PROMPT ...]`: samples of a trained pair. Only a shorter name for the command `eval.viewer`."""

import runpy

runpy.run_module("eval.viewer", run_name="__main__", alter_sys=True)
