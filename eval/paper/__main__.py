"""The experimental section of the paper in one command: `python -m eval.paper --preset pocket --out runs/paper`.

    OUT/config.json    settings, versions, checkpoints        OUT/parts/     a result file for each finished part
    OUT/runs/          runs of Algorithm 1                    OUT/figures/   PNG and SVG
    OUT/results.json   every number of the report             OUT/results.csv  the same, a row for each
    OUT/report.html    the report, complete in itself

Finished parts are kept: the same command on the same directory goes on where it stopped. `study.py` lists the parts.
"""

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch

from eval.paper.report.document import write_report
from eval.paper.schedule import Schedule
from eval.paper.study import STUDIES, StudyConfig, study_parts
from eval.run.command import one_line_errors
from eval.run.directory import lock_directory, remove_left_overs
from eval.run.options import PRESETS, OneLineParser, RunConfig, build
from eval.run.setup import identity, load_setup
from tinystories.checkpoint import read_json, write_json
from tinystories.errors import InputError

OVERRIDES = ("lm", "toxicity_model", "similarity_model", "device", "dtype", "rows")


def make_parser() -> OneLineParser:
    """The command line."""
    parser = OneLineParser(prog="eval.paper", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="pocket", help="scale of the study (default: pocket)")
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, says nothing else")
    add("--out", type=Path, default=Path("runs/paper"), help="directory to write to or to go on in")
    add("--seeds", type=int, nargs="+", metavar="S", help="seeds of the runs, at least two")
    add("--seeds-beside", type=int, metavar="N", help="baselines and ablations run on the first N of them (default: 3)")
    add("--jobs", type=int, help="parts at a time, each on one thread (default: cores, on a GPU 1)")
    for name in OVERRIDES:
        add("--" + name.replace("_", "-"), type=int if name == "rows" else str, help="as in main.py")
    return parser


def read_study(arguments: list[str] | None) -> tuple[StudyConfig, Path, int]:
    """The settings, the directory, and the number of jobs."""
    args = make_parser().parse_args(arguments)
    study = STUDIES["quick" if args.quick else args.preset]
    if args.jobs is not None and args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}; give at least 1")
    if args.seeds is not None:
        if len(set(args.seeds)) < max(2, len(args.seeds)) or min(args.seeds) < 0:
            raise InputError("--seeds wants at least two different numbers, none negative")
        study = dataclasses.replace(study, seeds=tuple(args.seeds))
    if args.seeds_beside is not None:
        if args.seeds_beside < 1:
            raise InputError(f"--seeds-beside is {args.seeds_beside}; give at least 1")
        study = dataclasses.replace(study, seeds_beside=args.seeds_beside)
    changes = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    run = build(RunConfig, dataclasses.asdict(study.run) | {"preset": args.preset, **changes})
    study = dataclasses.replace(study, run=run)
    jobs = args.jobs or (os.cpu_count() or 1 if study.run.torch_device().type == "cpu" else 1)
    return study, args.out, jobs


def description(study: StudyConfig) -> dict[str, Any]:
    """What config.json holds: the settings, versions, and hashes of the checkpoints."""
    packages = {"torch": torch, "numpy": numpy, "matplotlib": matplotlib}
    versions = {"python": platform.python_version()} | {name: item.__version__ for name, item in packages.items()}
    settings = json.loads(json.dumps(dataclasses.asdict(study)))
    for name in ("seed", "out", "keep_states"):  # set anew for every run
        del settings["run"][name]
    return settings | {"versions": versions, "checkpoints": identity(study.run)}


def differing(one: Any, other: Any, prefix: str = "") -> list[str]:
    """Names of the values, nested ones with dots, that two JSON objects do not share."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [prefix.rstrip(".")]
    keys = dict.fromkeys([*one, *other])
    return [name for key in keys for name in differing(one.get(key), other.get(key), f"{prefix}{key}.")]


@contextlib.contextmanager
def study_directory(out: Path, wanted: dict[str, Any]) -> Iterator[None]:
    """Hold a directory, new or of this very study, against other studies; InputError where it is anything else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); choose another directory") from error
    lock, path = lock_directory(out), out / "config.json"
    try:
        if path.exists():
            if changed := differing(read_json(path), wanted):
                fault = f"holds a study with other {', '.join(changed)}"
                raise InputError(f"--out {out}: {fault}; choose another directory or the settings in its config.json")
        elif any(file.name != ".lock" and not file.name.startswith(".config.json.") for file in out.iterdir()):
            raise InputError(f"--out {out}: holds other files and no study; choose another directory")
        else:
            write_json(path, wanted)
        remove_left_overs(out)
        yield
    finally:
        lock.release()


def run_study(study: StudyConfig, out: Path, jobs: int, command: str) -> None:
    """Everything that is missing, and the report."""
    shipped = load_setup(study.run).problems[0].exact is not None
    parts = study_parts(study, shipped)
    with study_directory(out, description(study)):
        schedule = Schedule(study, parts, out, jobs)
        schedule.run()
        if failed := schedule.failed:
            fault = f"{len(failed)} part{'s' if len(failed) > 1 else ''} failed ({', '.join(failed)})"
            raise InputError(f"{fault}; put right what {out / 'logs'} says, then give the same command again")
        write_report(study, parts, out, command)
        shutil.rmtree(out / "shared", ignore_errors=True)
    print(f"\nEverything is in {out}; open {out / 'report.html'}")


def main(arguments: list[str] | None = None) -> None:
    """Command line to report; bad input ends with one line and exit code 2, an interruption with code 130."""
    command = " ".join(["python -m eval.paper", *(sys.argv[1:] if arguments is None else arguments)])
    with one_line_errors("eval.paper", "lower --rows or --jobs"):
        try:
            run_study(*read_study(arguments), command)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; go on with {command}") from None


if __name__ == "__main__":
    main()
