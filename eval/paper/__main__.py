"""The experimental section of the paper in one command: `python -m eval.paper --out runs/paper`.

    OUT/parts/     a result file for each finished part     OUT/runs/      the runs of main.py
    OUT/results.json   every number                         OUT/target/    exact samples of sigma
    OUT/report.html    the report, complete in itself       OUT/figures/   PNG

`study.py` lists the parts. The same command on the same directory continues with the parts that are
not finished. `--only default- best` runs the parts whose names begin so and writes the numbers of
all finished parts, without a report. Options that are not listed here are passed on to every run of
main.py (`--device`).
"""

import argparse
import itertools
import multiprocessing
import os
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from eval.paper.numbers import collect, is_finished, write_results
from eval.paper.parts import run_part, start_worker
from eval.paper.report import write_report
from eval.paper.study import QUICK, Study, stages
from eval.run.command import one_line_errors
from eval.run.options import OneLineParser
from tinystories.errors import InputError


def read_study(arguments: list[str] | None) -> tuple[Study, argparse.Namespace]:
    """The settings, and the options out, jobs and only; InputError for options out of range."""
    parser = OneLineParser("eval.paper", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, which only show that everything runs")
    add("--out", type=Path, default="runs/paper", help="directory, new or of an unfinished study")
    add("--seeds", type=int, nargs="+", metavar="S", help="seeds of the runs, at least two")
    add("--only", nargs="+", default=[""], metavar="NAME", help="parts that begin so, no report")
    add("--jobs", type=int, default=os.cpu_count(), help="parts at a time, each on one thread")
    args, others = parser.parse_known_args(arguments)
    study = QUICK if args.quick else Study()
    seeds = tuple(args.seeds or study.seeds)
    study = replace(study, seeds=seeds, options=f"{study.options} {shlex.join(others)}")
    if len(set(seeds)) < max(2, len(seeds)):
        raise InputError("--seeds needs at least two different numbers")
    if args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}; give at least 1")
    for variant in study.variants():
        study.config(variant, min(seeds))
    return study, args


def run_parts(study: Study, out: Path, jobs: int, only: list[str]) -> None:
    """Run the parts that are not finished, `jobs` at a time; InputError where one fails."""
    names = ("rejection", *only)
    planned = [[part for part in stage if part.name.startswith(names)] for stage in stages(study)]
    every = list(itertools.chain(*planned))
    done = [part for part in every if is_finished(study, part, out)]
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), start_worker)
    try:
        for stage in planned:
            missing = [part for part in stage if part not in done]
            futures = {pool.submit(run_part, study, part, out): part for part in missing}
            for future in as_completed(futures):
                future.result()
                done.append(futures[future])
                print(f"{done[-1].name}  ({len(done)} of {len(every)} parts)", flush=True)
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    except BrokenProcessPool as error:
        raise InputError("a part was killed; if memory is short, lower --jobs") from error
    finally:
        pool.shutdown(cancel_futures=True)


def main(arguments: list[str] | None = None) -> None:
    """Command line to report; bad input ends with one line and code 2, Ctrl-C with code 130."""
    command = shlex.join(sys.argv[1:] if arguments is None else arguments)
    command = f"python -m eval.paper {command}"
    with one_line_errors("eval.paper", "lower --rows or --jobs"):
        try:
            study, args = read_study(arguments)
            run_parts(study, args.out, args.jobs, args.only)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; continue with {command}") from None
        if args.only == [""]:
            write_report(study, args.out, command)
            print(f"\nEverything is in {args.out}; open {args.out / 'report.html'}")
        else:
            write_results(collect(study, args.out), args.out)


if __name__ == "__main__":
    main()
