"""The main job at its smallest: in this process, or in others.

A forked process has loaded all libraries already, and has the code that oneDNN has compiled so far.
"""

import contextlib
import io
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import main
from distill.paper import Paper as Learner

CONTEXT = multiprocessing.get_context("fork")
TABLE = "--generations 1 --eval-runs 5 --eval-particles 4 2 --eval-target-proposals 60"
TABLE += " --beta 0.3 --length 5"
PAPER = "--ctl-updates 4 --ctl-batch-size 11 --particles 6 --distill-runs 13 --distill-updates 3"
POOLED = "--pool-first-draws 50 --pool-first-rounds 2 --pool-first-updates 3"
POOLED += " --pool-draws 45 --pool-updates 3 --pool-batch-size 9"
TUNED = "--updates 2 --batch-size 8"
SIZES = {"paper": PAPER, "pooled": POOLED, "dpo": TUNED, "grpo": TUNED}
JOBS = {name: f"{TABLE} --learner {name} {SIZES[name]}".split() for name in SIZES}
"""Options of a small run of each learner."""


def run_main(arguments: Iterable[object]) -> None:
    """The main job without its figures, which take longer than all the rest at this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "draw_figure", lambda *_: None)
        main.main([str(argument) for argument in arguments])


def refusal(*arguments: object, command: Callable[[list[str]], None] = run_main) -> str:
    """The last line on standard error, where a command ends with code 2 and one error."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        command([str(argument) for argument in arguments])
    lines = errors.getvalue().splitlines()
    assert ended.value.code == 2 and [line for line in lines if "error:" in line] == lines[-1:]
    return lines[-1]


def contents(run: Path) -> dict[str, bytes]:
    paths = [path for path in run.rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def products(run: Path) -> dict[str, bytes]:
    """What a finished run has made that no clock and no --out can change; nothing else is left."""
    own = ("config.json", "seconds.json")
    made = {name: content for name, content in contents(run).items() if name[0] != "."}
    assert {"results.json", "base/samples.jsonl", "generation-1/metrics.jsonl"} < made.keys()
    assert [name for name in contents(run) if "partial" in name] == []
    return {name: made[name] for name in made if not name.endswith(own)}


def signal_at(place: str, number: int = signal.SIGKILL) -> None:
    """Signal this process before the file whose path ends so is put in its place, or before a step
    of the phase and generation of this name is recorded."""

    def signalling(function: Callable) -> Callable:
        """A function of (source, place) or (learner, phase, m, ...) that signals first."""

        def call(*arguments: object, **figures: object) -> None:
            if " ".join(map(str, arguments[1:3])).endswith(place):
                os.kill(os.getpid(), number)
            function(*arguments, **figures)

        return call

    for owner, name in ((os, "replace"), (Learner, "record")):
        setattr(owner, name, signalling(getattr(owner, name)))


def job(arguments: list, folder: Path, prepare: Callable[[], None] = lambda: None) -> None:
    """The main job after prepare(); what it prints is added to two files of a folder."""
    rank = os.environ["RANK"]
    with (
        open(folder / f"errors-{rank}", "a") as sys.stderr,
        open(folder / f"output-{rank}", "a") as sys.stdout,
    ):
        prepare()
        run_main(arguments)


def exit_codes(count: int, function: Callable, *arguments: object) -> list[int]:
    """How processes end that call a function; they find each other, as torchrun starts them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def child(rank: int) -> None:
        place = shared | {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in place.items()}
        function(*arguments)

    processes = [CONTEXT.Process(target=child, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]
