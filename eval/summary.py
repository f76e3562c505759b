"""Several runs side by side: `python -m eval.summary runs/seed-1 runs/seed-2 ...`

Each number of the table is a mean over runs +- half of its 95 % interval (Student's t); in the last
row, of the change within each run from generation 0 to the last one. The runs share their exact
samples of sigma, whose error (`kl_half_width`) the intervals of KL leave out. The seconds below are
those of the phases, from seconds.json.
"""

import itertools
import re
from collections import Counter
from pathlib import Path

import torch

from eval.run.command import OneLineParser, one_line_errors
from eval.run.run import SECONDS, read_seconds
from eval.table import aligned, columns, named_rows, read_results
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tsmc.estimate import mean_estimate

NEUTRAL = ("seed", "out", "quiet", "versions")  # in which the runs of one kind may differ


def interval(rows: list[dict], key: str, form: str) -> str:
    """mean +- half width over runs; the mean alone where all agree; null is as in a table."""
    values = [row[key] for row in rows if key in row]
    if len(values) < len(rows):
        return ""
    if None in values:
        return "-inf" if key == "log_phi" else "-"
    mean = mean_estimate(torch.tensor(values, dtype=torch.float64))
    text = format(mean.value, form)
    is_alone = len(values) < 2 or mean.std_error < 1e-12
    return text if is_alone else f"{text} +- {format(mean.half_width(), form)}"


def read_runs(directories: list[Path]) -> list[dict]:
    """results.json of each run; InputError unless they differ in their seeds and nothing else."""
    configs = [read_json(directory / "config.json") for directory in directories]
    for directory, config in zip(directories, configs, strict=True):
        names = [name for name in config if name not in NEUTRAL]
        if changed := [name for name in names if config[name] != configs[0].get(name)]:
            fault = f"{directory}: differs from {directories[0]} in {', '.join(changed)}"
            raise InputError(f"{fault}; compare runs of one kind")
    if len({config.get("seed") for config in configs}) < len(configs):
        raise InputError("two of the runs have the same seed; name each seed once")
    return [read_results(directory) for directory in directories]


def summarise(runs: list[dict]) -> str:
    """The final table with intervals, and the change from the first generation to the last."""
    named = [named_rows(run) for run in runs]
    shown = columns(named[0], runs[0])
    for rows, run in zip(named, runs, strict=True):
        first, last = run["generations"][0], run["generations"][-1]
        both = [key for _, key, _ in shown if None not in (first.get(key), last.get(key))]
        rows["Last - first"] = {key: last[key] - first[key] for key in both}
    shared = [name for name in named[0] if all(name in rows for rows in named)]
    return aligned({name: [rows[name] for rows in named] for name in shared}, shown, interval)


def seconds_line(directories: list[Path]) -> str:
    """Seconds of each kind of phase in all generations together, mean over runs that have them."""
    runs = [read_seconds(path) for path in directories if (path / SECONDS).exists()]
    totals = Counter()
    for row in itertools.chain(*runs):
        totals[re.sub(r"^ladder.*", "ladder", row["phase"])] += row["seconds"] / len(runs)
    parts = [f"{phase} {seconds:.0f}" for phase, seconds in totals.items()]
    return f"\nSeconds: {', '.join(parts)}; in all {totals.total():.0f}" if parts else ""


def main(arguments: list[str] | None = None) -> None:
    """Print the summary of the runs named on the command line."""
    with one_line_errors("eval.summary"):
        parser = OneLineParser(prog="eval.summary", description=__doc__.splitlines()[0])
        parser.add_argument("runs", nargs="+", type=Path, help="runs that differ in their seeds")
        directories = parser.parse_args(arguments).runs
        print(summarise(read_runs(directories)) + seconds_line(directories))


if __name__ == "__main__":
    main()
