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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import main

METHOD = "fork" if torch.get_num_threads() == 1 else "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
CONTEXT.set_forkserver_preload(["main"])
SIZES = [
    *("--generations", "1", "--eval-runs", "5", "--eval-particles", "4", "--rows", "16"),
    *("--eval-base-samples", "20", "--eval-target-proposals", "60", "--beta", "0.3"),
    *("--length", "5", "--quiet"),
]
PUBLISHED = [
    *(*SIZES, "--ctl-updates", "4", "--ctl-batch-size", "11", "--ctl-hidden-units", "16"),
    *("--particles", "6", "--distill-runs", "13", "--distill-updates", "3"),
    *("--distill-batch-size", "9"),
]
POOLED = [
    *(*SIZES, "--learner", "pooled", "--pool-first-draws", "50", "--pool-first-rounds", "2"),
    *("--pool-first-updates", "3", "--pool-draws", "45", "--pool-updates", "3"),
    *("--pool-batch-size", "9", "--pool-hidden-units", "16"),
]
JOBS = {"published": PUBLISHED, "pooled": POOLED}
PRODUCTS = ["results.json", "samples.jsonl", "metrics.jsonl", "generation-*/*.safetensors"]


def run_main(arguments: Iterable[object]) -> None:
    """The main job without its figures, which take longer than all the rest at this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "draw_figures", lambda *_: None)
        main.main([str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The line on standard error with which a main job ends; its exit code is 2."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        run_main(arguments)
    lines = errors.getvalue().splitlines()
    assert ended.value.code == 2 and [line for line in lines if "error:" in line] == lines[-1:]
    return lines[-1]


def products(run: Path) -> dict[str, bytes]:
    """Contents of a run's files: results, samples, and what each generation has learned."""
    found = [path for pattern in PRODUCTS for path in run.glob(pattern)]
    assert len(found) == (5 if any(run.glob("*/adapter.safetensors")) else 6)
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


@dataclass
class Moment:
    """When a file is put in its place: just before or just after, the process gets a signal."""

    file: str
    is_after: bool
    signal: int = signal.SIGKILL

    def watch(self) -> None:
        """Replace the function that puts files in their place."""
        replace = os.replace

        def replace_and_signal(source: Path, target: Path) -> None:
            is_due = str(target).endswith(self.file)
            if is_due and not self.is_after:
                os.kill(os.getpid(), self.signal)
            replace(source, target)
            if is_due and self.is_after:
                os.kill(os.getpid(), self.signal)

        os.replace = replace_and_signal


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
