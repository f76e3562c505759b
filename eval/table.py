"""The table of a job's results as text: one row for Base, Target and each generation."""

import math
import shlex
from pathlib import Path

import torch

from eval.command import printable
from eval.metrics import COLUMNS, KL, Column, is_row, log_z_of, warning_of
from tinystories.files import read_json, reading
from tsmc.estimate import mean_estimate


def named_rows(results: dict) -> dict[str, dict]:
    """Base and Target, where there are any, and the generations."""
    rows = {name: results[name.lower()] for name in ("Base", "Target") if results.get(name.lower())}
    return rows | {f"Generation {m}": row for m, row in enumerate(results["generations"])}


def columns(rows: dict[str, dict], results: dict) -> list[Column]:
    """The informative ones of COLUMNS: of the classifier alone, log phi only repeats toxicity."""
    shown = {key for row in rows.values() for key in row}
    if results.get("potential", ["toxicity"]) in (["toxicity"], ["nontoxicity"]):
        shown.discard("log_phi")
    if all(row.get("phi_positive", 1) == 1 for row in rows.values()):
        shown.discard("phi_positive")
    if not any(row.get("dead_runs") for row in rows.values()):
        shown.discard("dead_runs")
    return [column for column in COLUMNS if column.key in shown]


def read_results(folder: Path) -> dict:
    """results.json of a job; ValueError where it holds none."""
    path = folder / "results.json"
    if folder.exists() and not path.exists():
        command = f"python main.py --resume {shlex.quote(str(folder))}"
        raise ValueError(f"{folder}: is not finished; go on with {command}")
    results = read_json(path)
    with reading(path, "holds no results of a job", "make the job again"):
        rows = [("base", results["base"]), *(("generation", row) for row in results["generations"])]
        rows += [("target", results["target"])] if results.get("target") else []
        if not all(is_row(name, row) for name, row in rows):
            raise ValueError("a row of its table is damaged")
    return results


def closing(results: dict, folder: Path) -> str:
    """What a job ends with: its table, texts, what it takes to beat rejection or what is missing,
    and the next command.

    A score gives 1 / sum W^2 over the number of particles, for their weights W in the last row.
    """
    rows = named_rows(results)
    shown = aligned({name: [row] for name, row in rows.items()}, columns(rows, results))
    lines, last = ["", shown, ""], list(rows)[-1]
    for name in ("Base", last):
        lines += [f"{name}:", *(f"  {printable(text)}" for text in rows[name]["examples"])]
    warnings = [warning_of(row, results) for row in results["generations"]]
    if "Target" in rows and "worth" in rows[last]:
        rate = math.exp(rows["Target"]["log_z"])
        cost = f"training has scored as many texts as {rows[last]['scores'] * rate:,.0f} exact"
        line = f"Rejection keeps 1 text in {1 / rate:,.0f}; {cost} samples need"
        if not warnings[-1]:  # else it is worth nothing to know how even the weights are
            line += f"; now a score gives at most {rows[last]['worth']:.2f} effective samples"
        lines += ["", f"{line}."]
    lines += [f"In {warning}." for warning in warnings if warning]
    command = f"python -m eval.sample {shlex.quote(str(folder))}"
    return "\n".join([*lines, f"Everything is in {folder}; more texts: {command}"])


def cell(row: dict, column: Column) -> str:
    """A number of a row, with half of its 95 % interval if that is known; empty without a number.

    null is -inf of log phi, else not finite.
    """
    key = column.key
    if key not in row:
        return ""
    if row[key] is None:
        return "-inf" if key == "log_phi" else "-"
    if key == "dead_runs":
        return f"{row[key]}/{row['num_runs']}"
    text, half_width = format(row[key], column.form), None
    if key == KL:
        half_width = row.get("kl_half_width")
    elif key == "log_z" and (found := log_z_of(row)):
        half_width = found.half_width()
    return text if half_width is None else f"{text} ± {format(half_width, column.form)}"


def mean_cell(rows: list[dict], column: Column) -> str:
    """The mean over jobs ± half of its 95 % interval; the number alone where all are equal."""
    values = [row.get(column.key) for row in rows]
    if len(rows) == 1 or None in values or column.key == "dead_runs":
        return cell(rows[0], column) if len(rows) == 1 else ""
    mean = mean_estimate(torch.tensor(values, dtype=torch.float64))
    text = format(mean.value, column.form)
    return text if mean.std_error < 1e-12 else f"{text} ± {format(mean.half_width(), column.form)}"


def aligned(rows: dict[str, list[dict]], shown: list[Column]) -> str:
    """Rows by name, of one job or several, in columns: the first flush left, the others right."""
    lines = [["", *(column.title for column in shown)]]
    for name, found in rows.items():
        lines.append([name, *(mean_cell(found, column) for column in shown)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
