"""The main job in processes of their own, forked from one that has imported everything."""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from main import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["main", "jobs"])


def job(arguments: list[str], errors: str, output: str, environment: dict[str, str], file_limit: int | None) -> None:
    """What a child process runs: the main job on one thread, standard error and output added to files."""
    torch.set_num_threads(1)
    os.environ |= environment
    if file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    with open(errors, "a") as sys.stderr, open(output, "a") as sys.stdout:
        main(arguments)


def start(arguments: list[str], errors: Path, output: Path = Path(os.devnull), file_limit: int | None = None, **place):
    """The main job, begun; `place` is its environment."""
    environment = {name: str(value) for name, value in place.items()}
    process = CONTEXT.Process(target=job, args=(arguments, str(errors), str(output), environment, file_limit))
    process.start()
    return process


def start_together(arguments: list[list[str]], folder: Path) -> list:
    """A job of several processes, each with its arguments, as torchrun starts them; process i writes errors-i, output-i."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = (
        {"WORLD_SIZE": len(arguments), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if len(arguments) > 1 else {}
    )
    return [
        start(own, folder / f"errors-{i}", folder / f"output-{i}", RANK=i, LOCAL_RANK=i, **place)
        for i, own in enumerate(arguments)
    ]


def lines_of(run: Path) -> int:
    """Steps that a run has reported so far."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process, run: Path, lines: int) -> None:
    """Until the run has reported that many steps, or has ended."""
    while process.is_alive() and lines_of(run) < lines:
        time.sleep(0.0005)
