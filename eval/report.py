"""The tables and figures of docs/results.md: `python -m eval.report runs/study docs/results.md`.

It reads every finished run NAME-SEED of `eval/study.py` and writes the tables between the page's
markers, <!-- table NAME --> and <!-- end -->, and the figures and numbers beside the page. A row of
a table is "NAME M", generation M of the runs NAME, or "A > B", the change from A to B within each
seed. A number is the mean over seeds with half of its 95 % interval (Student's t).
"""

import re
import subprocess
from pathlib import Path

from eval.command import OneLineParser, one_line_errors
from eval.figures import KL, draw_generations, draw_histogram, draw_populations
from eval.run import SECONDS, read_lines
from eval.study import WORDS
from eval.table import TABLE, mean_cell, named_rows, read_results
from tinystories.checkpoint import read_json, write_json, write_text
from tinystories.errors import InputError

LEARNERS = ("paper", "weighted", "pooled")
INGREDIENTS = {"lora": "weighted", "no-effective-potential": "weighted", "no-surrogate": "pooled"}
BASELINES = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")
GENERATIONS = [f"{name} {m}" for name in LEARNERS for m in range(3)]
CHANGES = [f"{name} 0 > {name} 2" for name in LEARNERS]
CHANGES += ["paper 1 > paper 2", "paper 2 > weighted 2", "weighted 2 > pooled 2"]
UPDATES = (70, 140, 280)  # of CTL
BUDGETS = [f"{name}-{n} {m}" for name in LEARNERS[:2] for n in UPDATES for m in (0, 2)]
RECORD = [f"{name} KL {level}" for level in ("3.0", "2.0") for name in LEARNERS]
COST = [*(f"{name} 2" for name in LEARNERS), *(f"{name} 0" for name in BASELINES)]
QUALITY = ("toxicity", "similarity", "energy", KL, "log_z_hat_mean")
CHANGED = ("toxicity", "energy", KL)
EVIDENCE = ("phi_positive", "log_z", "log_z_hat_std", "ess", "worth")
TABLES = {  # rows and columns
    "samples": (["Base", "Target", *GENERATIONS], QUALITY),
    "changes": (CHANGES, CHANGED),
    "diagnostics": (GENERATIONS, (KL, "kl_target_model", "ess", "largest_share", "distinct_texts")),
    "budgets": (BUDGETS, QUALITY),
    "ingredients": ([f"{name} 2 > {part} 2" for part, name in INGREDIENTS.items()], CHANGED),
    "baselines": ([f"{name} 0" for name in BASELINES], QUALITY[:-1]),
    "beside": ([f"{one} 2 > {name} 0" for one in LEARNERS[1:] for name in BASELINES], CHANGED),
    "populations": (GENERATIONS, ("K = 20", "K = 50", "K = 100", "K = 1000")),
    "record": (RECORD, ("seeds", "generation", "scores", "core_seconds")),
    "cost": (COST, ("scores", "core_seconds", "worth")),
    "words": ([f"{words} 1" for words in WORDS], EVIDENCE),
    "beta": (["Base", "beta-1 Target", "Target"], ("toxicity", "similarity", "num_samples")),
}
TITLES = {key: (title, form) for title, key, form in TABLE}
TITLES |= {  # title and format of a column
    "energy": ("energy", ".4f"),
    "kl_target_model": ("KL(sigma, p^(m))", ".2f"),
    "largest_share": ("largest share of a particle", ".2f"),
    "distinct_texts": ("distinct texts distilled", ",.0f"),
    "generation": ("generation", ".1f"),
    "seeds": ("seeds that reach it", ".0f"),
    "scores": ("scores", ",.0f"),
    "core_seconds": ("core seconds", ",.0f"),
    "worth": ("effective texts per score", ".3f"),
    "num_samples": ("texts", ".0f"),
}
Places = dict[str, dict[int, dict]]  # the row of each seed, by the name of the row


def read_study(folder: Path) -> Places:
    """The rows of all finished runs; InputError where there are none."""
    places: Places = {}
    for path in sorted(folder.glob("*-[0-9]*/results.json")):
        name, _, seed = path.parent.name.rpartition("-")
        spent = 0.0
        for title, row in named_rows(read_results(path.parent)).items():
            place = title  # Base and Target are the same for every learner
            if title.startswith("Generation") or name != "weighted":
                place = f"{name} {title.removeprefix('Generation ')}"
            places.setdefault(place, {})[int(seed)] = row
            own = path.parent / title.lower().replace(" ", "-")
            if (own / SECONDS).exists():
                spent += read_json(own / SECONDS)["core_seconds"]
                row["core_seconds"] = spent
            if title.startswith("Generation"):
                for record in read_lines(own / "metrics.jsonl"):
                    row["distinct_texts"] = record.get("distinct", row.get("distinct_texts"))
            for size, score in row.get("populations", {}).items():
                row[f"K = {size}"] = score
    if "Base" not in places:
        raise InputError(f"{folder}: holds no finished run weighted-SEED; run eval.study first")
    for title in RECORD:  # the first row of each seed whose KL is at most a level
        name, _, level = title.split()
        first = {}
        for m in range(3):
            for seed, row in places.get(f"{name} {m}", {}).items():
                if row[KL] <= float(level):
                    first.setdefault(seed, row)
        places[title] = {seed: row | {"seeds": len(first)} for seed, row in first.items()}
    return places


def rows_of(places: Places, title: str) -> list[dict]:
    """The row of each seed; for "A > B" what every number changes by from A to B."""
    before, _, after = title.partition(" > ")
    if not after:
        return list(places.get(before, {}).values())
    old, new = places.get(before, {}), places.get(after, {})
    changes = []
    for seed in sorted(old.keys() & new.keys()):
        pairs = {name: (old[seed].get(name), new[seed].get(name)) for name in CHANGED}
        changes.append({name: b - a for name, (a, b) in pairs.items() if None not in (a, b)})
    return changes


def cells(places: Places, name: str) -> dict[str, list[str]]:
    """The cells of a table by row; rows without a run are left out."""
    titles, columns = TABLES[name]
    forms = [TITLES.get(column, (column, ".3f"))[1] for column in columns]
    table = {}
    for title in titles:
        if rows := rows_of(places, title):
            table[title] = [mean_cell(rows, *one) for one in zip(columns, forms, strict=True)]
    return table


def fill(page: str, tables: dict[str, dict[str, list[str]]]) -> str:
    """The page with the tables between their markers; InputError for one that is not known."""

    def replaced(found: re.Match) -> str:
        if found[1] not in TABLES:
            raise InputError(f"table {found[1]}: is not one of {', '.join(TABLES)}; correct it")
        heads = [TITLES.get(column, (column,))[0] for column in TABLES[found[1]][1]]
        rows = {"": heads, "---": ["---"] * len(heads)} | tables[found[1]]
        rows = {title.replace(" > ", " → "): row for title, row in rows.items()}
        lines = [f"| {title} | {' | '.join(row)} |\n" for title, row in rows.items()]
        return f"<!-- table {found[1]} -->\n{''.join(lines)}<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def draw(places: Places, folder: Path) -> None:
    """The figures of a run, of all learners, and by the updates of CTL in place of generations."""
    ends = {name: {"": rows_of(places, name)} for name in ("Base", "Target")}
    learners = {}
    budgets = {"Target": ends["Target"]}
    for name in LEARNERS:
        learners[name] = {str(m): rows_of(places, f"{name} {m}") for m in range(3)}
        budgets[name] = {str(n): rows_of(places, f"{name}-{n} 2") for n in UPDATES}
    baselines = {name: {"": rows_of(places, f"{name}-full 0")} for name in ("dpo", "grpo")}
    betas = ends | {"beta 1": {"": rows_of(places, "beta-1 Target")}}
    draw_generations(ends | learners | baselines, "Generation", folder / "generations.png")
    draw_generations(budgets, "Updates of CTL", folder / "budgets.png")
    draw_populations(ends | learners, folder / "populations.png")
    draw_histogram(betas, "Base: beta 0, Target: beta 10", folder / "beta.png")


def main(arguments: list[str] | None = None) -> None:
    """Fill the page, and write the numbers and figures beside it."""
    with one_line_errors("eval.report"):
        parser = OneLineParser("python -m eval.report", description=__doc__.splitlines()[0])
        parser.add_argument("study", type=Path, help="folder of the runs of eval.study")
        parser.add_argument("page", type=Path, help="Markdown with markers of tables")
        args = parser.parse_args(arguments)
        places = read_study(args.study)
        folder = args.page.parent / "results"
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        tables = {name: cells(places, name) for name in TABLES}
        write_text(args.page, fill(args.page.read_text(encoding="utf-8"), tables))
        write_json(folder / "results.json", {"commit": commit, "tables": tables})
        draw(places, folder)


if __name__ == "__main__":
    main()
