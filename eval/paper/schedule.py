"""The parts of a study as processes: as many at a time as asked for, each on one thread, the longest that can start first.

A part is a process group: one process, and the `main.py` that it may have started. It writes OUT/parts/NAME.json, whole or
not at all, and what it says to OUT/logs/NAME.log. A part that was killed begins again, its run of Algorithm 1 behind the
last saved step. No number depends on how many parts run at a time.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from eval.paper.parts import compute
from eval.paper.study import Part, StudyConfig
from eval.run.directory import finite_or_null
from tinystories.checkpoint import write_json
from tinystories.errors import InputError
from tinystories.fast import keep_freed_memory

SILENCE = 30.0  # seconds without a word at most


def lead_a_group() -> None:
    """Make this process the leader of a group that ends as soon as the process that started it has ended, however it did."""
    os.setpgid(0, 0)  # Ctrl-C reaches the study alone, which passes it on once
    parent = multiprocessing.parent_process()

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def kill_group(leader: int) -> None:
    """End what is left of a part's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def work(study: StudyConfig, part: Part, out: Path) -> None:
    """What the process of a part runs."""
    lead_a_group()
    torch.set_num_threads(1)
    keep_freed_memory()
    began = time.monotonic()
    with open(out / "logs" / f"{part.name}.log", "a", encoding="utf-8", buffering=1) as log:
        with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            try:
                rows = finite_or_null(compute(study, part, out))
                write_json(out / "times" / f"{part.name}.json", {"seconds": round(time.monotonic() - began, 1)})
                write_json(out / "parts" / f"{part.name}.json", {"rows": rows})
                return
            except (InputError, KeyboardInterrupt) as error:
                print(f"\nerror: {error}", flush=True)  # behind a bar that has not ended
            except Exception:
                traceback.print_exc()
        sys.exit(2)


class Schedule:
    """Runs what is missing of a study's parts."""

    def __init__(self, study: StudyConfig, parts: list[Part], out: Path, jobs: int):
        self.study, self.parts, self.out, self.jobs = study, parts, out, jobs
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

        def weight(part: Part) -> float:
            return part.seconds + max((weight(later) for later in left if part.name in later.needs), default=0.0)

        free = [part for part in left if part.name not in self.running | self.failed]
        return sorted((part for part in free if all(map(self.is_done, part.needs))), key=weight, reverse=True)

    def remaining(self) -> float:
        """Seconds until the end, from what is expected of the parts left and how long the others took."""
        expected = sum(part.seconds for part in self.parts if not self.is_done(part.name))
        return expected / self.jobs * (self.spent / self.expected if self.expected else 1.0)

    def run(self) -> None:
        """Run every part that has no result yet; failures are left in `failed`. KeyboardInterrupt after all have stopped."""
        for folder in ("parts", "times", "logs", "runs"):
            (self.out / folder).mkdir(exist_ok=True)
        left = sum(not self.is_done(part.name) for part in self.parts)
        print(
            f"{left} of {len(self.parts)} parts to do, {self.jobs} at a time, logs in {self.out / 'logs'}", flush=True
        )
        try:
            while True:
                for part in self.waiting()[: self.jobs - len(self.running)]:
                    (self.out / "logs" / f"{part.name}.log").unlink(missing_ok=True)
                    process = self.context.Process(target=work, args=(self.study, part, self.out), name=part.name)
                    process.start()
                    self.running[part.name] = part, process, time.monotonic()
                if not self.running:
                    return
                sentinels = [process.sentinel for _, process, _ in self.running.values()]
                if not multiprocessing.connection.wait(sentinels, timeout=SILENCE):
                    print(*(f"{name}  {self.last_line(name)}" for name in self.running), sep="\n", flush=True)
                for name in [name for name, (_, process, _) in self.running.items() if not process.is_alive()]:
                    self.finish(name)
        except KeyboardInterrupt:
            self.stop()
            raise

    def finish(self, name: str) -> None:
        """Say how a part has ended."""
        part, process, began = self.running.pop(name)
        process.join()
        kill_group(process.pid)
        seconds = time.monotonic() - began
        if not self.is_done(name):
            killed = f"killed by signal {-process.exitcode}" if (process.exitcode or 0) < 0 else ""
            self.failed[name] = killed or self.last_line(name)
            print(f"{name}  FAILED: {self.failed[name]}", flush=True)
            return
        self.spent, self.expected = self.spent + seconds, self.expected + part.seconds
        done, left = sum(self.is_done(other.name) for other in self.parts), self.remaining() / 60
        print(f"{name}  {seconds:.0f} s  ({done}/{len(self.parts)} parts, about {left:.1f} min left)", flush=True)

    def last_line(self, name: str) -> str:
        """The last line of a part's log."""
        path = self.out / "logs" / f"{name}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1].removeprefix("error: ").removeprefix("main.py: ") if lines else "without a word so far"

    def stop(self) -> None:
        """Pass an interruption on, once, and wait; a second one ends everything at once."""
        processes = [process for _, process, _ in self.running.values()]
        with contextlib.suppress(KeyboardInterrupt):
            for process in processes:
                process.terminate()
            print("stopping after the current steps; again to stop at once", flush=True)
            for process in processes:
                process.join()
        for process in processes:
            process.kill()
            kill_group(process.pid)
