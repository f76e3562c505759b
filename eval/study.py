"""The products of the paper, and ours, from one command: `python -m eval.study --out runs/study`.

    OUT/runs/NAME-KEY    a run of main.py              OUT/results.json    all numbers of the tables
    OUT/parts/NAME-KEY.json    what a part measured    OUT/figures/       PNG

    target            samples of p^(0), and exact samples of sigma by rejection
    default-S, ...    a run of main.py with seed S (RUNS), and new populations of its pairs
    sweep-dpo-full    settings of a baseline, with a share of the scores, on a seed of its own
    dpo-full-S        the best of them with all scores, on seed S

KEY is a hash of what a part depends on: the version, options, networks, and the file of a
potential. So the same command continues where it was ended, and never takes over what was made
otherwise. Repeated on the same kind of machine, everything but the seconds is the same. Options
that are not listed here are passed on to main.py (`--device`).
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shlex
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import torch

from eval.baseline import METHODS
from eval.measure import MEASURE, Task
from eval.parts import LEARNERS, RUNS, Part, Study, files, target_part
from eval.report import draw_figures, fill, summarise, tables, version
from eval.run.command import OneLineParser, one_line_errors
from eval.run.run import finite_or_null
from eval.run.setup import identity
from tinystories.checkpoint import read_json, write_json
from tinystories.errors import InputError

MINUTES = {"target": 3, "run": 6, "sweep": 25, "baseline": 7}  # of one core, about
QUICK = Study(  # only shows that everything runs
    seeds=(1, 2),
    few=1,
    options="--length 3 --beta 0.3 --generations 1 --eval-particles 3 --eval-runs 3 "
    "--eval-base-samples 10",
    published="--particles 3 --ctl-updates 2 --ctl-batch-size 8 --distill-runs 3 "
    "--distill-updates 2 --distill-batch-size 4",
    pooled="--pool-first-draws 30 --pool-first-rounds 2 --pool-first-updates 2 --pool-draws 20 "
    "--pool-updates 2",
    proposals=300,
    best_of=2,
    best_texts=5,
    populations=(2, 4),
    particles=8,
    words=2,
    batch_size=4,
    first=((1, 0),),
    widenings=1,
)


def stages(study: Study) -> list[list[Part]]:
    """All parts; those of a stage need results of the stages before it."""
    runs, best = [], []
    for method in RUNS:
        seeds = study.seeds if method in LEARNERS else study.seeds[: study.few]
        runs += [Part(f"{method}-{seed}", "run", method, seed) for seed in seeds]
    sweeps = [Part(f"sweep-{method}", "sweep", method, study.sweep_seed) for method in METHODS]
    for method in METHODS:
        best += [Part(f"{method}-{s}", "baseline", method, s) for s in study.seeds[: study.few]]
    return [[target_part(study)], [*sweeps, *runs], best]


def read_study(arguments: list[str] | None) -> tuple[Study, argparse.Namespace]:
    """The sizes, and the options out, jobs and only; InputError for options out of range."""
    parser = OneLineParser("eval.study", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, which only show that everything runs")
    add("--out", type=Path, default="runs/study", help="directory, new or of an unfinished study")
    add("--seeds", type=int, nargs="+", metavar="S", help="seeds of the runs, at least two")
    add("--only", nargs="+", default=[""], metavar="NAME", help="only parts that begin so")
    add("--jobs", type=int, default=os.cpu_count(), help="parts at a time, each on one thread")
    args, others = parser.parse_known_args(arguments)
    study = QUICK if args.quick else Study()
    seeds = tuple(args.seeds or study.seeds)
    if len(set(seeds)) < max(2, len(seeds)) or study.sweep_seed in seeds:
        raise InputError(f"--seeds needs at least two, all different and none {study.sweep_seed}")
    if args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}; give at least 1")
    if any(other.partition("=")[0] == "--seed" for other in others):
        raise InputError("--seed is for a single run; give --seeds")
    study = replace(study, seeds=seeds, options=f"{study.options} {shlex.join(others)}")
    made_by = {"version": version()} | identity(study.config("default", 0))
    return replace(study, made_by=json.dumps(made_by)), args


def start_worker() -> None:
    """Prepare a process for its parts: one thread, and an end as soon as the study has ended."""
    os.setpgrp()  # Ctrl-C reaches the study alone, which then ends its workers
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait for the end of the process that has started this one, then end it and its main.py."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def run_part(study: Study, part: Part, out: Path) -> None:
    """Compute one part and write its file; InputErrors open with its name."""
    start = time.process_time()
    try:
        task = Task(study, part, out)
        result = MEASURE[part.kind](task)
    except InputError as error:
        raise InputError(f"{part.name}: {error}") from error
    result = {"seconds": time.process_time() - start} | result
    write_json(task.file, finite_or_null(result))


def chosen(study: Study, only: list[str]) -> list[list[Part]]:
    """The stages with the parts whose names begin so, and those that they need."""
    named = {part for stage in stages(study) for part in stage if part.name.startswith((*only,))}
    swept = {part.method for part in named if part.kind == "baseline"}
    named |= {part for part in stages(study)[1] if part.kind == "sweep" and part.method in swept}
    if not named:
        names = ", ".join(RUNS)
        raise InputError(f"--only {' '.join(only)}: no part begins so; name one of {names}")
    named.add(target_part(study))
    return [[part for part in stage if part in named] for stage in stages(study)]


def run_parts(study: Study, args: argparse.Namespace) -> None:
    """Run the parts that are not finished, --jobs at a time; InputError where one fails."""
    out = args.out
    planned = chosen(study, args.only)
    missing = [
        [part for part in stage if not files(study, part, out)[0].exists()] for stage in planned
    ]
    left = sum(map(len, missing))
    minutes = sum(MINUTES[part.kind] for stage in missing for part in stage)
    estimate = "" if args.quick else f", about {minutes / 60:.1f} hours of one core"
    print(f"{sum(map(len, planned))} parts, {left} to run{estimate}", flush=True)
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), start_worker)
    try:
        for stage in missing:
            futures = {pool.submit(run_part, study, part, out): part for part in stage}
            for future in as_completed(futures):
                future.result()
                left -= 1
                print(f"{futures[future].name} is done, {left} left", flush=True)
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        raise
    except BrokenProcessPool as error:
        raise InputError("a part was killed; if memory is short, lower --jobs") from error
    finally:
        pool.shutdown(cancel_futures=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the parts, print the tables; bad input ends with one line and code 2."""
    with one_line_errors("eval.study", "lower --rows or --jobs"):
        study, args = read_study(arguments)
        run_parts(study, args)
        every = [part for stage in stages(study) for part in stage]
        paths = {part: files(study, part, args.out)[0] for part in every}
        parts = {part: read_json(path) for part, path in paths.items() if path.exists()}
        results = summarise(parts)
        write_json(args.out / "results.json", results)
        draw_figures(results, args.out / "figures")
        empty = "".join(f"<!-- table {name} -->\n<!-- end -->\n\n" for name in tables(results))
        print(fill(empty, results))


if __name__ == "__main__":
    main()
