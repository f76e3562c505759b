"""The main job at its smallest: in this process, or in forked ones."""

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
from tsmc import streams

CONTEXT = multiprocessing.get_context("fork")
TABLE = "--generations 1 --eval-runs 4 --eval-particles 4 --eval-target-proposals 60"
TABLE += " --beta 0.3 --length 3"
PAPER = "--ctl-updates 3 --ctl-batch-size 11 --particles 6 --distill-runs 13 --distill-updates 3"
POOLED = "--pool-first-draws 50 --pool-first-rounds 2 --pool-first-updates 3 --pool-draws 45"
POOLED += " --pool-updates 3 --pool-batch-size 9 --potential keyword~3:named"
TUNED = "--updates 2 --batch-size 8"
SIZES = {"paper": PAPER, "pooled": POOLED, "dpo": TUNED, "grpo": TUNED}
JOBS = {name: f"{TABLE} --learner {name} {sizes}".split() for name, sizes in SIZES.items()}


def run_main(arguments: Iterable[object]) -> None:
    """The main job, which draws in several chunks even at this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK", 20)
        main.main([str(argument) for argument in arguments])


def refusal(*arguments: object, command: Callable[[list[str]], None] = run_main) -> str:
    """The last line on standard error, where a command ends with code 2 and one error."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        command([str(argument) for argument in arguments])
    lines = errors.getvalue().splitlines()
    assert ended.value.code == 2 and [line for line in lines if "error:" in line] == lines[-1:]
    return lines[-1]


def products(folder: Path) -> dict[str, bytes]:
    """What a finished job has made, by name, but for its options and its lock."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    made = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    assert {"results.json", "base/row.json", "generation-1/pair.safetensors"} < made.keys()
    return {name: made[name] for name in made if name not in ("config.json", ".lock")}


def signalling(function: Callable, moment: str, number: int) -> Callable:
    """A function that signals this process where its arguments, but for the first, end so."""

    def call(first: object, *names: object) -> object:
        if " ".join(map(str, names)).endswith(moment):
            os.kill(os.getpid(), number)
        return function(first, *names)

    return call


def exit_codes(
    count: int, arguments: list, folder: Path, moment: str = "never", number: int = signal.SIGKILL
) -> list[int]:
    """How the main job ends in processes that find each other as torchrun starts them; they are
    signalled before the file of this name takes its place, or where the random stream of this name
    begins. What they print is added to files of a folder."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def child(rank: int) -> None:
        names = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        names |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in names.items()}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
        os.replace = signalling(os.replace, moment, number)
        streams.Streams.stream = signalling(streams.Streams.stream, moment, number)
        with (
            open(folder / f"errors-{rank}", "a") as sys.stderr,
            open(folder / f"output-{rank}", "a") as sys.stdout,
        ):
            run_main(arguments)

    processes = [CONTEXT.Process(target=child, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]
