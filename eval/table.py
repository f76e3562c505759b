"""The table of a job's results as text: one row for Base, Target and each generation."""

import math
import shlex
from pathlib import Path

import torch

from eval.command import printable
from tinystories.files import read_json
from tsmc.estimate import Estimate, mean_estimate

TABLE = (
    ("toxicity", "toxicity", ".3f"),
    ("log phi", "log_phi", ".2f"),
    ("phi > 0", "phi_positive", ".3f"),
    ("ended", "ended", ".3f"),
    ("similarity", "similarity", ".3f"),
    ("energy", "energy", ".3f"),
    ("KL", "kl_target_proposal", ".2f"),
    ("log Z", "log_z", ".2f"),
    ("log Z-hat", "log_z_hat_mean", ".2f"),
    ("(spread)", "log_z_hat_std", ".2f"),
    ("ESS", "ess", ".1f"),
    ("distinct", "distinct", ".2f"),
    ("dead", "dead_runs", ".1f"),
)


def named_rows(results: dict) -> dict[str, dict]:
    """Base and Target, where there are any, and the generations."""
    rows = {name: results[name.lower()] for name in ("Base", "Target") if results.get(name.lower())}
    return rows | {f"Generation {m}": row for m, row in enumerate(results["generations"])}


def columns(rows: dict[str, dict], results: dict) -> list[tuple[str, str, str]]:
    """The informative part of TABLE: of the classifier alone, log phi only repeats toxicity."""
    shown = {key for row in rows.values() for key in row}
    if results.get("potential", ["toxicity"]) in (["toxicity"], ["nontoxicity"]):
        shown.discard("log_phi")
    if all(row.get("phi_positive", 1) == 1 for row in rows.values()):
        shown.discard("phi_positive")
    if not any(row.get("dead_runs") for row in rows.values()):
        shown.discard("dead_runs")
    return [column for column in TABLE if column[1] in shown]


def read_results(folder: Path) -> dict:
    """results.json of a job; ValueError where it holds none."""
    path = folder / "results.json"
    if folder.exists() and not path.exists():
        command = f"python main.py --resume {shlex.quote(str(folder))}"
        raise ValueError(f"{folder}: is not finished; go on with {command}")
    return read_json(path)


def closing(results: dict, folder: Path) -> str:
    """What a job ends with: its table, texts, what it takes to beat rejection, the next command.

    A score gives 1 / sum W^2 over the number of particles, for their weights W in the last row.
    """
    rows = named_rows(results)
    shown = aligned({name: [row] for name, row in rows.items()}, columns(rows, results))
    lines, last = ["", shown, ""], list(rows)[-1]
    for name in ("Base", last):
        lines += [f"{name}:", *(f"  {printable(text)}" for text in rows[name]["examples"])]
    if "Target" in rows and "worth" in rows[last]:
        rate = math.exp(rows["Target"]["log_z"])
        cost = f"training has scored as many texts as {rows[last]['scores'] * rate:,.0f} exact"
        gain = f"now a score gives at most {rows[last]['worth']:.2f} effective samples"
        lines += ["", f"Rejection keeps 1 text in {1 / rate:,.0f}; {cost} samples need; {gain}."]
    name = shlex.quote(str(folder))
    return "\n".join(
        [*lines, f"Everything is in {folder}; more texts: python -m eval.sample {name}"]
    )


def cell(row: dict, key: str, form: str) -> str:
    """A number of a row, empty where it has none; null is -inf of log phi, else not finite."""
    if key not in row:
        return ""
    if row[key] is None:
        return "-inf" if key == "log_phi" else "-"
    if key == "dead_runs":
        return f"{row[key]}/{row['num_runs']}"
    text = format(row[key], form)
    if key == "log_z" and row.get("log_z_std_error") is not None:  # of Base and Target
        draws = row.get("num_proposals", row["num_samples"])
        found = Estimate(row[key], row["log_z_std_error"], draws - 1)
        text += f" ± {format(found.half_width(), form)}"
    return text


def mean_cell(rows: list[dict], key: str, form: str) -> str:
    """The mean over runs ± half of its 95 % interval; the number alone where all are equal."""
    values = [row.get(key) for row in rows]
    if len(rows) == 1 or None in values or key == "dead_runs":
        return cell(rows[0], key, form) if len(rows) == 1 else ""
    mean = mean_estimate(torch.tensor(values, dtype=torch.float64))
    text = format(mean.value, form)
    return text if mean.std_error < 1e-12 else f"{text} ± {format(mean.half_width(), form)}"


def aligned(rows: dict[str, list[dict]], shown: list[tuple[str, str, str]]) -> str:
    """Rows by name, of one job or several, in columns: the first flush left, the others right."""
    lines = [["", *(title for title, _, _ in shown)]]
    for name, found in rows.items():
        lines.append([name, *(mean_cell(found, key, form) for _, key, form in shown)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
