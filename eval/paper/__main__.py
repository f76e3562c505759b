"""The experimental section of the paper in one command: `python -m eval.paper --preset pocket --out runs/paper`.

    OUT/config.json    settings, versions, checkpoints        OUT/parts/     a result file for each finished part
    OUT/runs/          runs of Algorithm 1                    OUT/figures/   PNG and SVG
    OUT/results.json   every number of the report             OUT/results.csv  the same, a row for each
    OUT/report.html    the report, complete in itself

Finished parts are kept: the same command on the same directory goes on where it stopped. `eval.study` lists the parts.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import numpy
import torch

from eval.paper.report.document import write_report
from eval.paper.schedule import Schedule
from eval.paper.study import STUDIES, StudyConfig, study_parts
from eval.run.directory import remove_left_overs
from eval.run.options import PRESETS, OneLineParser, RunConfig, check
from eval.run.setup import identity, load_ingredients
from tinystories.checkpoint import read_json, write_json
from tinystories.errors import InputError

OVERRIDES = ("lm", "toxicity_model", "similarity_model", "device", "dtype", "rows")


def make_parser() -> OneLineParser:
    """The command line."""
    parser = OneLineParser(prog="eval.paper", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default="pocket", help="scale of the study (default: pocket)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that everything runs, says nothing else"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="directory to write to or to go on in")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="S", help="seeds of the runs, at least two")
    parser.add_argument("--jobs", type=int, help="parts at a time, each on one thread (default: cores, on a GPU 1)")
    for name in OVERRIDES:
        kind = int if name == "rows" else str
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="as in main.py")
    return parser


def read_study(arguments: list[str] | None) -> tuple[StudyConfig, Path, int, str]:
    """The settings, the directory, the number of jobs, and the command that goes on with this study."""
    given = make_parser().parse_args(arguments)
    study = STUDIES["quick" if given.quick else given.preset]
    if given.jobs is not None and given.jobs < 1:
        raise InputError(f"--jobs is {given.jobs}; give at least 1")
    if given.seeds is not None:
        if len(set(given.seeds)) < max(2, len(given.seeds)) or min(given.seeds) < 0:
            raise InputError("--seeds wants at least two different numbers, none negative")
        study = dataclasses.replace(study, seeds=tuple(given.seeds))
    changes = {name: getattr(given, name) for name in OVERRIDES if getattr(given, name) is not None}
    for item in dataclasses.fields(RunConfig):
        if item.name in changes:
            check("--" + item.name.replace("_", "-"), changes[item.name], item.metadata)
    study = dataclasses.replace(study, run=dataclasses.replace(study.run, preset=given.preset, **changes))
    jobs = given.jobs or (os.cpu_count() or 1 if study.run.torch_device().type == "cpu" else 1)
    words = sys.argv[1:] if arguments is None else arguments
    return study, given.out, jobs, " ".join(["python -m eval.paper", *words])


def description(study: StudyConfig) -> dict[str, Any]:
    """What config.json holds: the settings, versions, and hashes of the checkpoints."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "matplotlib": matplotlib.__version__,
    }
    settings = json.loads(json.dumps(dataclasses.asdict(study)))
    for name in ("seed", "out"):  # set anew for every run
        del settings["run"][name]
    return settings | {"versions": versions, "checkpoints": identity(study.run)}


def differing(one: Any, other: Any, prefix: str = "") -> list[str]:
    """Names of the values, nested ones with dots, that two JSON objects do not share."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [prefix.rstrip(".")]
    keys = dict.fromkeys([*one, *other])
    return [name for key in keys for name in differing(one.get(key), other.get(key), f"{prefix}{key}.")]


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the directory and hold it against other studies; InputError where one is writing there or nobody can."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror}); choose another directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(f"{out}: another study is writing there; wait for it or stop it") from None
    finally:
        os.close(lock)


def check_directory(out: Path, wanted: dict[str, Any]) -> None:
    """Write config.json, or check that the one there is of this very study."""
    path = out / "config.json"
    if path.exists():
        if changed := differing(read_json(path), wanted):
            words = f"holds a study with other {', '.join(changed)}"
            raise InputError(f"--out {out}: {words}; choose another directory or the settings in its config.json")
    elif any(not file.name.startswith(".config.json.") for file in out.iterdir()):
        raise InputError(f"--out {out}: holds other files and no study; choose another directory")
    else:
        write_json(path, wanted)


def run_study(study: StudyConfig, out: Path, jobs: int, command: str) -> None:
    """Everything that is missing, and the report."""
    shipped = load_ingredients(study.run).problems[0].target is not None
    parts, wanted = study_parts(study, shipped), description(study)
    with locked(out):
        check_directory(out, wanted)
        remove_left_overs(out)
        schedule = Schedule(study, parts, out, jobs, lambda line: print(line, flush=True))
        schedule.run()
        if schedule.failed:
            count = "1 part" if len(schedule.failed) == 1 else f"{len(schedule.failed)} parts"
            words = f"{count} failed ({', '.join(schedule.failed)})"
            raise InputError(f"{words}; put right what {out / 'logs'} says, then give the same command again")
        write_report(study, parts, out, command)
        shutil.rmtree(out / "shared", ignore_errors=True)
    print(f"\nEverything is in {out}; open {out / 'report.html'}")


def main(arguments: list[str] | None = None) -> None:
    """Command line to report; bad input ends with one line and exit code 2, an interruption with code 130."""
    command = ""
    try:
        study, out, jobs, command = read_study(arguments)
        run_study(study, out, jobs, command)
    except InputError as error:
        stop(f"error: {error}", 2)
    except KeyboardInterrupt:
        stop(f"interrupted; go on with {command}", 130)


def stop(message: str, code: int) -> NoReturn:
    """One line on standard error, and the end."""
    print(f"eval.paper: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
