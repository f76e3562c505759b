"""The parts of a study as processes: as many at a time as asked for, each on one thread, the longest that can start first.

A part is one process that writes OUT/parts/NAME.json, whole or not at all, and what it says to OUT/logs/NAME.log. A part that
is killed begins again, a run of Algorithm 1 behind its last saved step. No number depends on how many run at a time.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from eval.paper.parts import compute
from eval.paper.study import Part, StudyConfig
from eval.run.directory import finite_or_null
from tinystories.checkpoint import write_json
from tinystories.errors import InputError
from tinystories.memory import keep_freed_memory

POLL = 0.5  # seconds between looks at the processes


def die_with_parent() -> None:
    """End this process as soon as the one that started it has ended, however it did."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(study: StudyConfig, part: Part, out: Path) -> None:
    """What the process of a part runs."""
    os.setpgid(0, 0)  # ctrl-C reaches the parent alone, which passes it on once
    die_with_parent()
    torch.set_num_threads(1)
    keep_freed_memory()
    began = time.monotonic()
    with open(out / "logs" / f"{part.name}.log", "a", encoding="utf-8", buffering=1) as log:
        with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            try:
                found = finite_or_null(compute(study, part, out))
                write_json(out / "times" / f"{part.name}.json", {"seconds": round(time.monotonic() - began, 1)})
                write_json(out / "parts" / f"{part.name}.json", found)
                return
            except InputError as error:
                print(f"error: {error}", flush=True)
            except KeyboardInterrupt as interruption:
                print(f"error: {interruption or 'interrupted'}", flush=True)
            except BaseException as error:
                import traceback

                traceback.print_exc()
                print(f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        sys.exit(2)


def last_line(path: Path) -> str:
    """The last line of a log, without its mark."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1].removeprefix("error: ") if lines else "ended without a word"


class Schedule:
    """Runs what is missing of a study's parts."""

    def __init__(self, study: StudyConfig, parts: list[Part], out: Path, jobs: int, say: Callable[[str], None]):
        self.study, self.parts, self.out, self.jobs, self.say = study, parts, out, jobs, say
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["eval.paper.schedule", "torch._dynamo"])  # what each part would load anew
        self.running: dict[str, tuple[Part, multiprocessing.Process, float]] = {}
        self.failed: dict[str, str] = {}
        self.spent = self.expected = 0.0  # seconds of the parts that have finished here, and what was expected of them

    def is_done(self, name: str) -> bool:
        """Whether a part has its result."""
        return (self.out / "parts" / f"{name}.json").exists()

    def waiting(self) -> list[Part]:
        """Parts that can start now, the longest first; one that others wait for counts their time too."""
        left = [part for part in self.parts if not self.is_done(part.name)]
        free = [part for part in left if part.name not in self.running and part.name not in self.failed]

        def weight(part: Part) -> float:
            return part.seconds + max((weight(later) for later in left if part.name in later.needs), default=0.0)

        ready = [part for part in free if all(self.is_done(name) for name in part.needs)]
        return sorted(ready, key=weight, reverse=True)

    def remaining(self) -> float:
        """Seconds until the end, from what is expected of the parts left and how long the others took."""
        now, pace = time.monotonic(), self.spent / self.expected if self.expected else 1.0
        left = 0.0
        for part in self.parts:
            if part.name in self.running:
                left += max(0.0, part.seconds * pace - (now - self.running[part.name][2]))
            elif not self.is_done(part.name) and part.name not in self.failed:
                left += part.seconds * pace
        return left / self.jobs

    def run(self) -> None:
        """Run every part that has no result yet; failures are left in `failed`. KeyboardInterrupt after all have stopped."""
        for folder in ("parts", "times", "logs", "runs"):
            (self.out / folder).mkdir(exist_ok=True)
        try:
            while True:
                for part in self.waiting()[: self.jobs - len(self.running)]:
                    self.start(part)
                if not self.running:
                    return
                multiprocessing.connection.wait([process.sentinel for _, process, _ in self.running.values()], POLL)
                for name in [name for name, (_, process, _) in self.running.items() if not process.is_alive()]:
                    self.finish(name)
        except KeyboardInterrupt:
            self.stop()
            raise

    def start(self, part: Part) -> None:
        """Start the process of a part, which ends if this one does."""
        (self.out / "logs" / f"{part.name}.log").unlink(missing_ok=True)
        process = self.context.Process(target=work, args=(self.study, part, self.out), name=part.name)
        process.start()
        self.running[part.name] = part, process, time.monotonic()

    def finish(self, name: str) -> None:
        """Say how a part has ended."""
        part, process, began = self.running.pop(name)
        process.join()
        seconds = time.monotonic() - began
        if self.is_done(name):
            self.spent, self.expected = self.spent + seconds, self.expected + part.seconds
            done = sum(self.is_done(other.name) for other in self.parts)
            self.say(
                f"{name}  {seconds:.0f} s  ({done}/{len(self.parts)} parts, about {self.remaining() / 60:.1f} min left)"
            )
            return
        killed = f"killed by signal {-process.exitcode}" if (process.exitcode or 0) < 0 else ""
        self.failed[name] = killed or last_line(self.out / "logs" / f"{name}.log")
        self.say(f"{name}  FAILED: {self.failed[name]}")

    def stop(self) -> None:
        """Pass an interruption on, once, and wait; a second one ends everything at once."""
        try:
            for _, process, _ in self.running.values():
                process.terminate()
            self.say("stopping after the current steps; again to stop at once")
            for _, process, _ in self.running.values():
                process.join()
        except KeyboardInterrupt:
            for _, process, _ in self.running.values():
                os.kill(process.pid, signal.SIGKILL)
