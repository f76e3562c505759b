"""The main job at its smallest size: in this process, or in others that are forked from it.

A forked process has loaded all libraries already, and the code that oneDNN has compiled so far.
"""

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

import main

CONTEXT = multiprocessing.get_context("fork")
SIZES = [
    *("--generations", "1", "--eval-runs", "5", "--eval-particles", "4"),
    *("--eval-base-samples", "20", "--eval-target-proposals", "60", "--beta", "0.3"),
    *("--rows", "16", "--length", "5", "--quiet"),
]
DISTILLED = [
    *("--method", "distilled", *SIZES, "--ctl-updates", "4", "--ctl-batch-size", "11"),
    *("--particles", "6", "--distill-runs", "13", "--distill-updates", "3"),
    *("--distill-batch-size", "9"),
]
POOLED = [
    *("--method", "pooled", *SIZES, "--pool-rounds", "1", "--pool-updates", "4"),
    *("--pool-batch-size", "7", "--pool-base-draws", "50", "--pool-draws", "45"),
]
PRODUCTS = ("results.json", "samples.jsonl", "metrics.jsonl")
PRODUCTS += ("generation-1/model.safetensors", "generation-1/twist.safetensors")


def run_main(arguments: Iterable[object]) -> None:
    """The main job without its figures, which take longer than all the rest at this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "draw_figures", lambda *_: None)
        main.main([str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The last line on standard error of a main job that ends with exit code 2."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        run_main(arguments)
    lines = errors.getvalue().splitlines()
    assert ended.value.code == 2 and sum("error:" in line for line in lines) == 1, lines
    assert lines[-1].partition(": ")[2].startswith("error: "), lines
    return lines[-1]


def products(run: Path) -> dict[str, bytes]:
    """What a run has computed."""
    return {name: (run / name).read_bytes() for name in PRODUCTS}


@dataclass
class Moment:
    """When a file is about to be put in its place, or just after; then the process is signalled."""

    file: str
    is_written: bool
    signal: int = signal.SIGKILL

    def watch(self) -> None:
        """Replace the function that puts files in their place."""
        replace = os.replace

        def replace_and_signal(source: Path, target: Path) -> None:
            is_due = str(target).endswith(self.file)
            if is_due and not self.is_written:
                os.kill(os.getpid(), self.signal)
            replace(source, target)
            if is_due and self.is_written:
                os.kill(os.getpid(), self.signal)

        os.replace = replace_and_signal


def child(
    function: Callable,
    argument: object,
    folder: Path,
    environment: dict[str, str],
    file_limit: int | None,
    moment: Moment | None,
) -> None:
    """What a child process runs; what it prints is added to two files."""
    os.environ |= environment
    rank = environment.get("RANK", "0")
    if file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    if moment is not None:
        moment.watch()
    with (
        open(folder / f"errors-{rank}", "a") as sys.stderr,
        open(folder / f"output-{rank}", "a") as sys.stdout,
    ):
        function(argument)


def start(
    argument: object,
    folder: Path,
    function: Callable = run_main,
    file_limit: int | None = None,
    moment: Moment | None = None,
    **place: object,
) -> multiprocessing.Process:
    """function(argument), begun in a process of its own; `place` is its environment."""
    environment = {name: str(value) for name, value in place.items()}
    arguments = (function, argument, folder, environment, file_limit, moment)
    process = CONTEXT.Process(target=child, args=arguments)
    process.start()
    return process


def start_together(argument: object, folder: Path, count: int = 2, **options) -> list:
    """The same in several processes that find each other, as torchrun starts them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(argument, folder, **options, RANK=rank, LOCAL_RANK=rank, **place)
        for rank in range(count)
    ]


def ended(*processes) -> list[int]:
    """The exit codes of processes, once they have ended."""
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def wait_for(process, path: Path) -> None:
    """Until a file is there; fails where the process ends first."""
    while not path.exists():
        assert process.is_alive(), f"ended before it wrote {path}"
        time.sleep(0.002)
