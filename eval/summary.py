"""Several runs side by side: `python -m eval.summary runs/seed-1 runs/seed-2 ... [--against ...]`

    mean over runs +- half of the 95 % interval (Student's t), of every column of the final table

The last row gives the change from generation 0 to the last one, taken within each run. Runs share
only their exact samples of sigma, whose error (`kl_half_width`) the intervals of KL leave out.
"""

from pathlib import Path

import torch

from eval.run.command import one_line_errors
from eval.run.options import OneLineParser
from eval.run.table import align, columns, named_rows, table
from tinystories.checkpoint import read_json
from tinystories.errors import InputError, printable
from tsmc.estimate import Estimate, difference, mean_estimate

NEUTRAL = ("seed", "out", "quiet", "versions")  # in which the runs of one kind may differ


def estimate(values: list[float]) -> Estimate:
    return mean_estimate(torch.tensor(values, dtype=torch.float64))


def plus_minus(mean: Estimate, form: str) -> str:
    return f"{format(mean.value, form)} +- {format(mean.half_width(), form)}"


def interval(values: list[float | None], form: str) -> str:
    """mean +- half width; the mean alone where all values agree, -inf (null) where any is."""
    if None in values:
        return "-inf"
    mean = estimate(values)
    is_alone = len(values) < 2 or mean.std_error < 1e-12
    return format(mean.value, form) if is_alone else plus_minus(mean, form)


def other_options(run: Path, reference: Path) -> dict[str, object]:
    """The options of a run that differ from those of another one."""
    config, wanted = (read_json(directory / "config.json") for directory in (run, reference))
    changed = [key for key in config if key not in NEUTRAL and config[key] != wanted.get(key)]
    return {key: config[key] for key in changed}


def read_runs(directories: list[Path]) -> list[dict]:
    """results.json of each run; InputError unless they differ in their seeds and nothing else."""
    results = [read_json(directory / "results.json") for directory in directories]
    for directory, result in zip(directories, results, strict=True):
        table(result, directory / "results.json")  # InputError where there is none
        if changed := other_options(directory, directories[0]):
            fault = f"{directory}: differs from {directories[0]} in {', '.join(changed)}"
            raise InputError(f"{fault}; compare runs of one kind")
    seeds = {read_json(directory / "config.json").get("seed") for directory in directories}
    if len(seeds) < len(directories):
        raise InputError("two of the runs have the same seed; name each seed once")
    return results


def summarise(runs: list[dict]) -> str:
    """The final table with intervals, and the change from the first generation to the last."""
    shown = columns(runs[0])
    named = [named_rows(run) for run in runs]
    rows = {name: [rows[name] for rows in named] for name in named[0]}
    if len(runs[0]["generations"]) > 1:
        rows["Last - first"] = [change(run["generations"]) for run in runs]
    lines = [["", *(title for title, _, _ in shown)]]
    for name, each in rows.items():
        cells = []
        for _, key, form in shown:
            values = [row[key] for row in each if key in row]
            cells.append(interval(values, form) if len(values) == len(each) else "")
        lines.append([name, *cells])
    return align(lines)


def change(generations: list[dict]) -> dict[str, float]:
    """The last generation minus the first, in every number that both have."""
    first, last = generations[0], generations[-1]
    return {key: last[key] - first[key] for key in first if None not in (first[key], last.get(key))}


def compare(ours: list[dict], theirs: list[dict]) -> str:
    """Differences of the means of two sets of runs with half of their 95 % intervals (Welch)."""
    shown = [column for column in columns(ours[0]) if column in columns(theirs[0])]
    lines = [["", *(title for title, _, _ in shown)]]
    one, other = ([named_rows(run) for run in runs] for runs in (ours, theirs))
    for name in [name for name in one[0] if name in other[0] and name != "Target"]:
        cells = []
        for _, key, form in shown:
            a, b = ([rows[name].get(key) for rows in runs] for runs in (one, other))
            is_known = None not in a + b
            cells.append(plus_minus(difference(estimate(a), estimate(b)), form) if is_known else "")
        lines.append([name, *cells])
    return align(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the summary of the runs named on the command line, and how they compare with others."""
    with one_line_errors("eval.summary"):
        parser = OneLineParser(prog="eval.summary", description=__doc__.splitlines()[0])
        several = {"nargs": "+", "type": Path}
        parser.add_argument("runs", help="runs that differ in their seeds", **several)
        parser.add_argument("--against", help="runs of other options", default=[], **several)
        args = parser.parse_args(arguments)
        ours = read_runs(args.runs)
        print(summarise(ours))
        if args.against:
            theirs = read_runs(args.against)
            options = other_options(args.against[0], args.runs[0]).items()
            kind = printable(", ".join(f"{key} {value}" for key, value in options))
            print(f"\nAgainst these runs, {kind or 'of equal options'}:\n{summarise(theirs)}")
            print(f"\nThe first minus these (Welch):\n{compare(ours, theirs)}")


if __name__ == "__main__":
    main()
