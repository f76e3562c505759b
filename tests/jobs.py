"""The main job at its smallest: in this process, or in others.

A forked process has loaded all libraries already, and has the code that oneDNN has compiled so far.
But forked from one that has computed on several threads it would wait for them for ever: then it is
forked from a server that has loaded main.py and computed nothing.
"""

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import main
from eval.run import Run

METHOD = "fork" if torch.get_num_threads() == 1 else "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
CONTEXT.set_forkserver_preload(["main"])
TABLE = ["--generations", "1", "--eval-runs", "5", "--eval-particles", "4", "2"]
TABLE += ["--eval-target-proposals", "60", "--beta", "0.3", "--length", "5"]
PAPER = ["--ctl-updates", "4", "--ctl-batch-size", "11", "--particles", "6"]
PAPER += ["--distill-runs", "13", "--distill-updates", "3"]
POOLED = ["--pool-first-draws", "50", "--pool-first-rounds", "2", "--pool-first-updates", "3"]
POOLED += ["--pool-draws", "45", "--pool-updates", "3", "--pool-batch-size", "9"]
TUNED = ["--updates", "2", "--batch-size", "8"]
SIZES = {"paper": PAPER, "weighted": PAPER, "pooled": POOLED, "dpo": TUNED, "grpo": TUNED}
JOBS = {name: [*TABLE, "--learner", name, *sizes] for name, sizes in SIZES.items()}
"""Options of a small run of each learner."""


def run_main(arguments: Iterable[object]) -> None:
    """The main job without its figures, which take longer than all the rest at this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "draw_figures", lambda *_: None)
        main.main([str(argument) for argument in arguments])


def refusal(*arguments: object, command: Callable[[list[object]], None] = run_main) -> str:
    """The last line on standard error, where a command ends with code 2 and one error."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        command([str(argument) for argument in arguments])
    lines = errors.getvalue().splitlines()
    assert ended.value.code == 2 and [line for line in lines if "error:" in line] == lines[-1:]
    return lines[-1]


def products(run: Path) -> dict[str, bytes]:
    """The contents of all that a finished run has made, by name; nothing else is left in it."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    made = {name: path.read_bytes() for name, path in files.items() if path.name[0] != "."}
    assert {"results.json", "base/samples.jsonl", "generation-1/metrics.jsonl"} < made.keys()
    assert {path.name for path in run.iterdir() if path.name[0] == "." and path.is_dir()} == set()
    own = ("config.json", "seconds.json", ".png")
    return {name: made[name] for name in made if not name.endswith(own)}


@dataclass
class Moment:
    """When a process gets a signal: just before or just after a file or folder is put in its place,
    or the first step of a phase is recorded."""

    place: str  # how the path ends, or the name of the phase and its generation
    is_after: bool = False
    signal: int = signal.SIGKILL

    def watch(self) -> None:
        """From now on."""
        for owner, name in ((os, "replace"), (os, "rename"), (Run, "__call__")):
            setattr(owner, name, self.signalling(getattr(owner, name)))

    def signalling(self, function: Callable) -> Callable:
        """A function of (source, place) or (run, phase, generation, ...) that signals as well."""

        def call(*arguments: object, **figures: object) -> None:
            is_due = " ".join(map(str, arguments[1:3])).endswith(self.place)
            if is_due and not self.is_after:
                os.kill(os.getpid(), self.signal)
            function(*arguments, **figures)
            if is_due and self.is_after:
                os.kill(os.getpid(), self.signal)

        return call


def child(arguments: list, folder: Path, place: dict, options: dict) -> None:
    """What a process runs; what it prints is added to two files."""
    os.environ |= {name: str(value) for name, value in place.items()}
    if "moment" in options:
        options["moment"].watch()
    if "file_limit" in options:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["file_limit"], options["file_limit"]))
    rank = place.get("RANK", 0)
    with (
        open(folder / f"errors-{rank}", "a") as sys.stderr,
        open(folder / f"output-{rank}", "a") as sys.stdout,
    ):
        run_main(arguments)


def start(arguments: list, folder: Path, place=(), **options):
    """A main job in a process of its own, begun in the environment `place`.

    Options: the `moment` of a signal, and `file_limit`, the bytes that no file may exceed.
    """
    process = CONTEXT.Process(target=child, args=(arguments, folder, dict(place), options))
    process.start()
    return process


def start_together(arguments: list, folder: Path, **options) -> list:
    """The same in two processes that find each other, as torchrun starts them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(2)]
    return [start(arguments, folder, place, **options) for place in places]


def ended(*processes) -> list[int]:
    """The exit codes of processes, once they have ended."""
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]
