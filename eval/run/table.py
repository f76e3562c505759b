"""The table of a run's results as text: one row for Base, Target and each generation."""

from pathlib import Path

from tinystories.checkpoint import reading

TABLE = (
    ("log phi", "log_phi", ".2f"),
    ("phi > 0", "phi_positive", ".3f"),
    ("toxicity", "toxicity", ".3f"),
    ("similarity", "similarity", ".3f"),
    ("energy", "energy", ".3f"),
    ("KL(sigma||q)", "kl_target_proposal", ".2f"),
    ("log Z", "log_z", ".2f"),
    ("log Z-hat", "log_z_hat_mean", ".2f"),
    ("(spread)", "log_z_hat_std", ".2f"),
    ("ESS", "ess", ".1f"),
    ("distinct", "distinct", ".2f"),
    ("dead", "dead_runs", ".1f"),
)


def named_rows(results: dict) -> dict[str, dict]:
    """Base, Target and the generations."""
    rows = {"Base": results["base"]}
    rows |= {"Target": results["target"]} if results.get("target") else {}
    return rows | {f"Generation {m}": row for m, row in enumerate(results["generations"])}


def columns(results: dict) -> list[tuple[str, str, str]]:
    """The informative part of TABLE: with toxicity alone, log phi only repeats it."""
    rows = named_rows(results).values()
    shown = {key for row in rows for key in row}
    if results.get("potential", ["toxicity"]) == ["toxicity"]:
        shown.discard("log_phi")
    if all(row.get("phi_positive", 1) == 1 for row in rows):
        shown.discard("phi_positive")
    if not any(row.get("dead_runs") for row in rows):
        shown.discard("dead_runs")
    return [column for column in TABLE if column[1] in shown]


def table(results: dict, source: Path) -> str:
    """The rows as aligned columns; InputError, naming `source`, where it holds no results."""
    with reading(source, "holds no results of a run"):
        shown = columns(results)
        lines = [["", *(title for title, _, _ in shown)]]
        for name, row in named_rows(results).items():
            lines.append([name, *(cell(row, key, form) for _, key, form in shown)])
        return align(lines)


def cell(row: dict, key: str, form: str) -> str:
    """A number of a row, empty where the row has none; log phi = -inf is null in JSON."""
    if key not in row:
        return ""
    if row[key] is None:
        return "-inf"
    if key == "dead_runs":
        return f"{row[key]}/{row['num_runs']}"
    return format(row[key], form)


def align(lines: list[list[str]]) -> str:
    """Cells in columns, the first flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(row).rstrip() for row in rows)
