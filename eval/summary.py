"""Several runs side by side: `python -m eval.summary runs/seed-1 runs/seed-2 ...`

    mean over runs +- half of the 95 % interval (Student's t), of every column of the final table

The last rows give the change from generation 0 to the last one, taken within each run before averaging: runs share their
exact samples of sigma but nothing else, so the runs are the independent units. The intervals of KL therefore leave out the
error of these samples, which each run's `kl_half_width` holds; log Z_sigma cancels in the change.
"""

from pathlib import Path

import torch

from eval.run.command import one_line_errors
from eval.run.options import OneLineParser
from eval.run.table import align, columns, named_rows, tables
from tinystories.checkpoint import read_json
from tinystories.errors import InputError
from tsmc.estimate import mean_estimate


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


def main() -> None:
    """Print the summary of the runs named on the command line."""
    with one_line_errors("eval.summary"):
        parser = OneLineParser(prog="eval.summary", description=__doc__.splitlines()[0])
        parser.add_argument("runs", nargs="+", type=Path, help="directories that main.py wrote, alike but for the seed")
        print(summarise(read_runs(parser.parse_args().runs)))


if __name__ == "__main__":
    main()
