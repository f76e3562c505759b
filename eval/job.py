"""A job of `main.py` is a folder, which process 0 locks and writes; and how a command ends.

    config.json                                  every option, and all that sigma depends on
    base/row.json                                the rows Base and Target
    target/samples.safetensors                   exact samples of sigma, if there are any
    generation-0/pair.safetensors, row.json ...  a generation each; its row is written last
    results.json                                 all rows, once the last one is there

With --resume a job goes on behind its last row, to the same results, for random streams have names.
"""

import contextlib
import ctypes
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from safetensors import SafetensorError

from distill.pair import Pair, load_pair, save_pair
from distill.paper import Paper
from eval.evaluate import KL
from eval.options import Options, read_job
from eval.world import World, save_target, sigma_of
from tinystories.load import read_json, write_json
from tsmc.streams import gathered, process

PAIR, ROW = "pair.safetensors", "row.json"
ERRORS = (ValueError, OSError, re.error, SafetensorError, ImportError, MemoryError, RuntimeError)
OPTIONS = ("loading state_dict", "CUDA generator", "device string")  # in errors that options mend


class Job:
    """The folder of a job, locked by the process that writes it."""

    def __init__(self, options: Options, resumed: Path | None):
        """A new job, or that in the folder `resumed`; ValueError where it cannot be."""
        self.options = options
        path = resumed or Path(options.out or f"runs/{options.preset}")
        number = 1
        while not (resumed or options.out) and path.exists():
            number += 1
            path = Path(f"runs/{options.preset}-{number}")
        self.path = gathered(path)[0]
        self.is_writer = process()[0] == 0
        if not self.is_writer:
            return
        if path.exists() and not resumed:
            raise ValueError(f"--out {path}: exists already; choose another, or use --resume")
        path.mkdir(parents=True, exist_ok=True)
        self.lock = filelock.FileLock(path / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(f"{path}: another process is writing there") from None
        sigma = sigma_of(options)
        if resumed and read_job(path)["sigma"] != sigma:
            raise ValueError(f"{path}: its networks or its potential have changed since it began")
        write_json(path / "config.json", dataclasses.asdict(options) | {"sigma": sigma})

    def file(self, m: int | None, name: str = ROW) -> Path:
        """A file of generation m, or of Base and Target where m is None."""
        return self.path / ("base" if m is None else f"generation-{m}") / name

    def num_done(self) -> int:
        """How many generations are kept, with generation 0; the same answer in all processes."""
        count = 0
        while self.file(count).exists():
            count += 1
        return gathered(count)[0]

    def keep_ends(self, rows: dict[str, dict], world: World) -> None:
        """Write the exact samples, if there are any, and the rows Base and Target."""
        if self.is_writer:
            if world.exact is not None:
                save_target(self.path / "target", world.exact, self.options)
            write_json(self.file(None), rows)

    def keep(self, m: int, row: dict[str, Any], pair: Pair, learner: Paper) -> Pair:
        """Write a generation, its row last; returns the pair of process 0 in every process."""
        if self.is_writer:
            save_pair(self.file(m, PAIR), pair, learner.base, learner.state())
            write_json(self.file(m), row | {"figures": learner.figures})
            said = [f"{key} {row[key]:.3g}" for key in ("toxicity", "log_phi", KL) if key in row]
            print(f"generation {m}: {', '.join(said)}", file=sys.stderr, flush=True)
        learner.figures = {}
        gathered(None)  # nobody reads before it is there
        return pair if process()[1] == 1 else self.restore(m, learner)

    def restore(self, m: int, learner: Paper) -> Pair:
        """(p^(m), psi^(m)) of a generation, and the learner as it was then."""
        pair, state = load_pair(self.file(m, PAIR), learner.base)
        learner.resume(state)
        return pair

    def finish(self) -> dict[str, Any]:
        """Write results.json: the rows Base and Target, and those of all generations."""
        options = self.options
        results = {"learner": options.learner, "seed": options.seed, **read_json(self.file(None))}
        results["generations"] = [read_json(self.file(m)) for m in range(options.generations + 1)]
        if self.is_writer:
            write_json(self.path / "results.json", results)
        return results


@contextlib.contextmanager
def command(program: str) -> Iterator[list[str]]:
    """Run a command: a user's mistake ends it in one line, Ctrl-C with those of the list too."""
    if sys.platform == "linux":
        # Keep freed pages: no mmap, no trim, one arena. Zeroed ones are a third of a training step.
        for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-8, 1)):  # M_... of <malloc.h>
            ctypes.CDLL(None).mallopt(parameter, value)
    remedies: list[str] = []
    try:
        yield remedies
    except KeyboardInterrupt:
        print("; ".join([f"{program}: interrupted", *remedies]), file=sys.stderr)
        sys.exit(130)
    except ERRORS as error:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text:
            text = "out of memory; lower the numbers of particles or the batch sizes"
        elif isinstance(error, RuntimeError) and not any(words in text for words in OPTIONS):
            raise  # a mistake of ours
        print(f"{program}: error: {text}", file=sys.stderr)
        sys.exit(2)
