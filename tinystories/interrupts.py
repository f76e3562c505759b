"""Ctrl-C in the second or two that a command's libraries take to load: it ends the command at once, without a traceback.

Imported before torch. A program that imports the packages of this project keeps its own way of being interrupted.
"""

import signal
import sys
from pathlib import Path

PROGRAMS = {"main.py", "self-distilled-tsmc", "tsmc"}
PACKAGES = {"tinystories", "tsmc", "eval"}  # of `python -m eval.summary`, for example


def is_command() -> bool:
    """Whether this process was started as one of the project's commands."""
    if sys.argv[:1] == ["-m"]:  # while Python still looks for the module
        return any(word.split(".")[0] in PACKAGES for word in sys.orig_argv)
    return bool(sys.argv) and Path(sys.argv[0]).name in PROGRAMS


def have_loaded() -> None:
    """Make Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
