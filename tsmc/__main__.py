"""`python -m tsmc RUN [PROMPT ...]`: samples of a trained pair. Only a name for the command `eval.viewer`; nothing imports it."""

import runpy

runpy.run_module("eval.viewer", run_name="__main__", alter_sys=True)
