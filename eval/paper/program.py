"""Algorithm 1 inside a study: `main.py` as the program that it is, on a run in OUT/runs.

A part that was killed goes on inside the phase where its run stopped. The variants of a run (without the effective potential,
by LoRA) are the run itself up to where they leave it: the states of those phases are handed on in OUT/shared, so that no
variant repeats them.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from eval.paper.task import Task
from eval.run.directory import RunDirectory
from eval.run.setup import identity
from tinystories.checkpoint import replacing
from tinystories.errors import InputError
from tinystories.interrupts import MAIN

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SHARED = {  # phases of the run itself that a variant takes over
    "no-effective": ("0-twist-learning", "0-evaluation", "1-sampling", "1-distillation"),
    "lora": ("0-twist-learning", "0-evaluation", "1-sampling"),
}


def finished_run(task: Task) -> Path:
    """The directory of a part's run, begun or continued, and brought to its end."""
    path, shared = Path(task.config.out), task.out / "shared" / str(task.part.seed)
    states = path / "resume"
    if not (path / "results.json").exists():
        if not (states / "start").exists():
            shutil.rmtree(path, ignore_errors=True)  # killed before it had begun
            with RunDirectory.create(task.config, identity(task.config)) as run:
                pass  # main.py takes it up
            if run.interrupted:
                raise KeyboardInterrupt("interrupted")
        copy_states(SHARED.get(task.part.kind, ()), shared, states)
        run_main(path)
    if task.part.kind == "tsmc" and states.exists():
        copy_states({name for names in SHARED.values() for name in names}, states, shared)
        shutil.rmtree(states)
    return path


def copy_states(names: set[str] | tuple[str, ...], source: Path, folder: Path) -> None:
    """Copy the states of the named phases, each whole or not at all, where there are any to copy and none yet."""
    for name in sorted(names):
        if (source / name).exists() and not (folder / name).exists():
            with replacing(folder / name) as temporary:
                shutil.copyfile(source / name, temporary)


def run_main(path: Path) -> None:
    """Run `main.py --resume PATH` to its end; SIGTERM is passed on to it, and it then stops between two steps.

    What it says goes where standard error goes. KeyboardInterrupt where it was stopped; where it has failed this process ends.
    """
    is_stopped = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        process.terminate()

    command = [sys.executable, str(MAIN), "--resume", str(path)]
    with subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, env=os.environ | ONE_THREAD) as process:
        previous = signal.signal(signal.SIGTERM, pass_on)
        code = process.wait()
    signal.signal(signal.SIGTERM, previous)
    if is_stopped:
        raise KeyboardInterrupt("interrupted")
    if code < 0:
        raise InputError(f"main.py was killed by signal {-code}")
    if code:
        sys.exit(2)  # its last line has said why
