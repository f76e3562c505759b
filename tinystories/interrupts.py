"""Ctrl-C in the second or two that a command's libraries take to load: it ends the command at once, without a traceback.

Imported before torch. A program that imports the packages of this project keeps its own way of being interrupted.
"""

import signal
import sys
import threading
from pathlib import Path

MAIN = Path(__file__).resolve().parents[1] / "main.py"
SCRIPTS = {"self-distilled-tsmc", "tsmc"}  # beside the interpreter, where they have been installed
PACKAGES = {"tinystories", "tsmc", "eval"}  # of `python -m eval.summary`, for example


def is_command() -> bool:
    """Whether this process was started as one of the project's commands."""
    program, words = Path(sys.argv[0] if sys.argv else ""), sys.orig_argv
    if program == Path("-m"):  # while Python still looks for the module
        return "-m" in words[:-1] and words[words.index("-m") + 1].split(".")[0] in PACKAGES
    return program.resolve() == MAIN or (program.stem in SCRIPTS and program.parent == Path(sys.executable).parent)


def have_loaded() -> None:
    """Make Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


is_main_thread = threading.current_thread() is threading.main_thread()
if is_main_thread and is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
