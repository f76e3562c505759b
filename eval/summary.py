"""Several runs side by side: `python -m eval.summary runs/seed-1 runs/seed-2 ... [--against other/seed-1 ...]`

    mean over runs +- half of the 95 % interval (Student's t), of every column of the final table

The last rows give the change from generation 0 to the last one, taken within each run before averaging: runs share their
exact samples of sigma but nothing else, so the runs are the independent units. The intervals of KL therefore leave out the
error of these samples, which each run's `kl_half_width` holds; log Z_sigma cancels in the change.
"""

from pathlib import Path

import torch

from eval.run.command import one_line_errors, printable
from eval.run.options import OneLineParser
from eval.run.table import align, columns, named_rows, tables
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tsmc.estimate import difference, mean_estimate


def interval(values: list[float | None], form: str) -> str:
    """mean +- half width; the mean alone where all values agree, -inf (null in the files) where any is."""
    if None in values:
        return "-inf"
    estimate = mean_estimate(torch.tensor(values, dtype=torch.float64))
    text = format(estimate.value, form)
    if len(values) < 2 or estimate.std_error < 1e-12:
        return text
    return f"{text} +- {format(estimate.half_width(), form)}"


def read_runs(directories: list[Path]) -> list[dict]:
    """results.json of each run; InputError where they are not finished runs of the same options but for the seed."""
    configs = [read_json(directory / "config.json") for directory in directories]
    if len({config.get("seed") for config in configs}) < len(configs):
        raise InputError("two of the runs have the same seed, so they are not independent; name each seed once")
    for directory, config in zip(directories, configs, strict=True):
        changed = [key for key in config if key not in ("seed", "out") and config[key] != configs[0].get(key)]
        if changed:
            raise InputError(
                f"{directory}: differs from {directories[0]} in {', '.join(changed)}; compare runs of one kind"
            )
    results = [read_json(directory / "results.json") for directory in directories]
    for directory, result in zip(directories, results, strict=True):
        if "prompts" in result:
            raise InputError(f"{directory}: has several prompts, and so several tables; name runs of one prompt")
        tables(result, directory / "results.json")  # InputError where there is none
    return results


def summarise(runs: list[dict]) -> str:
    """The final table with intervals, and the change from the first generation to the last."""
    shown = columns(runs[0])
    lines = [["", *(title for title, _, _ in shown)]]

    def add(name: str, rows: list[dict]) -> None:
        cells = [interval([row[key] for row in rows], form) if key in rows[0] else "" for _, key, form in shown]
        lines.append([name, *cells])

    named = [named_rows(run) for run in runs]
    for name in named[0]:
        add(name, [rows[name] for rows in named])
    generations = [run["generations"] for run in runs]
    if len(generations[0]) > 1:
        ends = [rows[m] for rows in generations for m in (0, -1)]
        keys = [key for _, key, _ in shown if all(row.get(key) is not None for row in ends)]
        add("Last - first", [{key: rows[-1][key] - rows[0][key] for key in keys} for rows in generations])
    return align(lines)


def other_options(ours: Path, theirs: Path) -> str:
    """The options in which the runs `theirs` differ from `ours`, with their values there."""
    one, other = (read_json(run / "config.json") for run in (ours, theirs))
    keys = [key for key in other if key not in ("seed", "out", "versions") and other[key] != one.get(key)]
    return printable(", ".join(f"{key} {other[key]}" for key in keys)) or "whose options are the same"


def compare(ours: list[dict], theirs: list[dict]) -> str:
    """Differences of the means of two sets of runs with half of their 95 % intervals, row by row."""
    shown = [column for column in columns(ours[0]) if column in columns(theirs[0])]
    lines = [["", *(title for title, _, _ in shown)]]
    one, other = ([named_rows(run) for run in runs] for runs in (ours, theirs))
    for name in [name for name in one[0] if name in other[0] and name != "Target"]:
        cells = []
        for _, key, form in shown:
            values = [[rows[name].get(key) for rows in runs] for runs in (one, other)]
            if any(value is None for side in values for value in side):
                cells.append("")
                continue
            a, b = (mean_estimate(torch.tensor(side, dtype=torch.float64)) for side in values)
            gap = difference(a, b)
            cells.append(f"{format(gap.value, form)} +- {format(gap.half_width(), form)}")
        lines.append([name, *cells])
    return align(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the summary of the runs named on the command line, and how they compare with others."""
    with one_line_errors("eval.summary"):
        parser = OneLineParser(prog="eval.summary", description=__doc__.splitlines()[0])
        parser.add_argument("runs", nargs="+", type=Path, help="directories that main.py wrote, alike but for the seed")
        parser.add_argument(
            "--against", nargs="+", type=Path, default=[], help="runs with other options, to compare with"
        )
        args = parser.parse_args(arguments)
        ours = read_runs(args.runs)
        print(summarise(ours))
        if args.against:
            theirs = read_runs(args.against)
            print(f"\nAgainst these runs, {other_options(args.runs[0], args.against[0])}:\n{summarise(theirs)}")
            print(f"\nThe first minus these (Welch):\n{compare(ours, theirs)}")


if __name__ == "__main__":
    main()
