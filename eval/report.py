"""The tables and figures of docs/results.md: `python -m eval.report runs/study docs/results.md`.

It reads every finished run NAME-SEED of `eval/study.py` and writes the tables between the page's
markers, <!-- table NAME --> and <!-- end -->, and the figures and numbers beside the page. A row of
a table is "NAME M", generation M of the runs NAME, or "A > B", the change from A to B within each
seed. A number is the mean over seeds with half of its 95 % interval (Student's t).
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from eval.command import OneLineParser, one_line_errors
from eval.figures import ENDS, LOOKS, save_figure
from eval.run import SECONDS, read_lines
from eval.table import mean_cell, named_rows, read_results
from tinystories.checkpoint import read_json, write_json, write_text
from tinystories.errors import InputError

LEARNERS = ("paper", "weighted", "pooled")
INGREDIENTS = {"lora": "weighted", "no-effective-potential": "weighted", "no-surrogate": "pooled"}
BASELINES = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")
GENERATIONS = [f"{name} {m}" for name in LEARNERS for m in range(3)]
BUDGETS = (70, 140, 280)  # updates of CTL
LEVELS = (3.0, 2.0)  # of KL in the record table
QUALITY = ("toxicity", "similarity", "energy", "kl_target_proposal", "log_z_hat_mean")
CHANGED = ("toxicity", "energy", "kl_target_proposal")
TABLES = {  # rows and columns
    "samples": (["Base", "Target", *GENERATIONS], QUALITY),
    "changes": (
        [
            *(f"{name} 0 > {name} 2" for name in LEARNERS),
            *("paper 1 > paper 2", "paper 2 > weighted 2", "weighted 2 > pooled 2"),
        ],
        CHANGED,
    ),
    "diagnostics": (
        GENERATIONS,
        ("kl_target_proposal", "kl_target_model", "ess", "largest_share", "distinct_texts"),
    ),
    "budgets": (
        [f"{name}-{n} {m}" for name in LEARNERS[:2] for n in BUDGETS for m in (0, 2)],
        QUALITY,
    ),
    "ingredients": (
        [f"{name} 2 > {without} 2" for without, name in INGREDIENTS.items()],
        CHANGED,
    ),
    "baselines": ([f"{name} 0" for name in BASELINES], QUALITY[:-1]),
    "beside": ([f"{one} 2 > {name} 0" for one in LEARNERS for name in BASELINES], CHANGED),
    "populations": (GENERATIONS, ("K = 20", "K = 50", "K = 100", "K = 1000")),
    "record": (
        [f"{name} KL {level}" for level in LEVELS for name in LEARNERS],
        ("seeds", "generation", "scores", "core_seconds"),
    ),
    "cost": (
        [*(f"{name} 2" for name in LEARNERS), *(f"{name} 0" for name in BASELINES)],
        ("scores", "core_seconds", "worth"),
    ),
    "beta": (
        ["Base", "beta-1 Target", "Target"],
        ("toxicity", "similarity", "num_samples"),
    ),
}
TITLES = {  # title and format of a column
    "energy": ("energy", ".4f"),
    "kl_target_proposal": ("KL(sigma, q)", ".2f"),
    "kl_target_model": ("KL(sigma, p^(m))", ".2f"),
    "log_z_hat_mean": ("log Z-hat", ".2f"),
    "ess": ("ESS", ".1f"),
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
    places: Places = defaultdict(dict)
    for path in sorted(folder.glob("*-[0-9]*/results.json")):
        name, _, seed = path.parent.name.rpartition("-")
        spent = 0.0
        for title, row in named_rows(read_results(path.parent)).items():
            if title.startswith("Generation"):
                own = path.parent / title.lower().replace(" ", "-")
                if (own / SECONDS).exists():
                    spent += read_json(own / SECONDS)["core_seconds"]
                    row["core_seconds"] = spent
                for record in read_lines(own / "metrics.jsonl"):
                    row["distinct_texts"] = record.get("distinct", row.get("distinct_texts"))
                for size, score in row.get("populations", {}).items():
                    row[f"K = {size}"] = score
            place = f"{name} {title.removeprefix('Generation ')}"
            if name == "weighted" and title in ENDS:  # they are the same for every learner
                place = title
            places[place][int(seed)] = row
    for name in LEARNERS:
        for level in LEVELS:
            places[f"{name} KL {level}"] = first_below(places, name, level)
    if "Base" not in places:
        raise InputError(f"{folder}: holds no finished run weighted-SEED; run eval.study first")
    return places


def first_below(places: Places, name: str, level: float) -> dict[int, dict]:
    """The first row of each seed whose KL(sigma||q) is at most `level`."""
    found: dict[int, dict] = {}
    m = 0
    while f"{name} {m}" in places:
        for seed, row in places[f"{name} {m}"].items():
            if row["kl_target_proposal"] <= level:
                found.setdefault(seed, row)
        m += 1
    return {seed: row | {"seeds": len(found)} for seed, row in found.items()}


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
    table = {}
    for title in titles:
        if rows := rows_of(places, title):
            forms = [TITLES.get(column, (column, ".3f"))[1] for column in columns]
            table[title] = [mean_cell(rows, *one) for one in zip(columns, forms, strict=True)]
    return table


def fill(page: str, tables: dict[str, dict[str, list[str]]]) -> str:
    """The page with the tables between their markers; InputError for one that is not known."""

    def replaced(found: re.Match) -> str:
        if found[1] not in TABLES:
            raise InputError(f"table {found[1]}: is not one of {', '.join(TABLES)}; correct it")
        heads = [TITLES.get(column, (column,))[0] for column in TABLES[found[1]][1]]
        lines = [["", *heads], ["---"] * (1 + len(heads))]
        for title, numbers in tables[found[1]].items():
            lines.append([title.replace(" > ", " → "), *numbers])
        shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"<!-- table {found[1]} -->\n{shown}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def points(places: Places, title: str, column: str) -> list[float]:
    """A number of each seed."""
    return [row[column] for row in rows_of(places, title)]


def draw_generations(places: Places, folder: Path) -> None:
    """Similarity against toxicity (paper, Fig. 1), and KL by generation."""
    figure, (plane, kl) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for name, (colour, marker) in (LOOKS | ENDS).items():
        titles = [f"{name} {m}" for m in range(3)] if name in LEARNERS else [f"{name}-full 0"]
        titles = [name] if name in ENDS else titles
        titles = [title for title in titles if title in places]
        if not titles:
            continue
        look = {"color": colour, "marker": marker, "label": name}
        x = [np.mean(points(places, title, "similarity")) for title in titles]
        y = [np.mean(points(places, title, "toxicity")) for title in titles]
        plane.plot(x, y, **look, ms=11 if name in ENDS else 6)
        if len(titles) > 1:
            for m, place in enumerate(zip(x, y, strict=True)):
                plane.annotate(f"{m}", place, xytext=(4, -11), textcoords="offset points")
            values = np.array([points(places, one, "kl_target_proposal") for one in titles])
            kl.plot(values, color=colour, lw=0.6, alpha=0.5)
            kl.plot(values.mean(1), **look, lw=2)
    plane.set(title="Good: where Target is", xlabel="Similarity", ylabel="Toxicity")
    kl.set(title="Good: low (thin: each seed)", xlabel="Generation", ylabel="KL(sigma||q), nats")
    kl.set_xticks(range(3))
    plane.legend()
    save_figure(figure, folder / "generations.png")


def draw_populations(places: Places, folder: Path) -> None:
    """Toxicity by the number of particles (paper, Fig. 2): a panel for each learner."""
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.3), sharey=True, layout="constrained")
    sizes = (20, 50, 100, 1000)
    for axes, name in zip(panels, LEARNERS, strict=True):
        for m, style in enumerate((":", "--", "-")):
            if rows := rows_of(places, f"{name} {m}"):
                means = [np.mean([row.get(f"K = {k}", np.nan) for row in rows]) for k in sizes]
                axes.plot(sizes, means, style, color=LOOKS[name][0], marker=f"${m}$", ms=8)
        axes.axhline(points(places, "Target", "toxicity")[0], color="black", lw=0.8)
        axes.set(title=name, xscale="log", xlabel="Particles K")
        axes.set_xticks(sizes, sizes)
        axes.minorticks_off()
    panels[0].set_ylabel("Toxicity by generation\n(good: at Target's line)")
    save_figure(figure, folder / "populations.png")


def draw_budgets(places: Places, folder: Path) -> None:
    """Generation 2 by the updates of CTL in each generation."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    shown = {"kl_target_proposal": "KL(sigma||q), good: low", "toxicity": "Toxicity"}
    for axes, (column, label) in zip(panels, shown.items(), strict=True):
        for name in LEARNERS[:2]:
            there = [n for n in BUDGETS if f"{name}-{n} 2" in places]
            values = [points(places, f"{name}-{n} 2", column) for n in there]
            colour, marker = LOOKS[name]
            for n, each in zip(there, values, strict=True):
                axes.plot([n] * len(each), each, marker, color=colour, alpha=0.4)
            axes.plot(there, [np.mean(each) for each in values], color=colour, label=name)
        axes.set(xscale="log", xlabel="Updates of CTL in each generation", ylabel=label)
        axes.set_xticks(BUDGETS, BUDGETS)
        axes.minorticks_off()
    panels[1].axhline(points(places, "Target", "toxicity")[0], color="black", lw=0.8)
    panels[0].legend()
    save_figure(figure, folder / "budgets.png")


def draw_histograms(places: Places, folder: Path) -> None:
    """The toxicity of exact samples by beta (the paper's histograms)."""
    figure, axes = plt.subplots(figsize=(5, 3.3))
    for beta, title in zip((0, 1, 10), TABLES["beta"][0], strict=True):
        for row in rows_of(places, title)[:1]:
            axes.stairs(row["histogram"], np.linspace(0, 1, 21), label=f"beta {beta}", lw=2)
    axes.set(xlabel="Toxicity", ylabel="Share of texts", yscale="log")
    axes.legend()
    save_figure(figure, folder / "beta.png")


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
        for draw in (draw_generations, draw_populations, draw_budgets, draw_histograms):
            draw(places, folder)


if __name__ == "__main__":
    main()
