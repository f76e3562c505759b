"""The tables and figures of docs/results.md, from the rows of all jobs that `eval/study.py` keeps.

A table of a page, between <!-- table --> and <!-- end -->, says itself what it shows: a row is
"NAME M", generation M of the runs NAME, or "A → B", the change from A to B within each seed, and a
column has a title of `eval/metrics.py`. Behind <!-- table sad- --> the runs are sad-NAME. A number
is the mean over seeds with half of its 95 % interval (Student's t).
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from eval.figures import COLOURS, LEVELS, MARKERS, Lines, draw_panels, save
from eval.metrics import COLUMNS, FURTHER, KL, Column
from eval.table import mean_cell

LEARNERS = ("paper", "every-step", "pooled")
TRADED = ("paper", "pooled", "dpo-full", "grpo-lora", "rl")  # toxicity against similarity
SIGMAS = {"beta = 0": "paper Base", "beta = 1": "beta-1 Target", "beta = 10": "paper Target"}
TITLES = {column.title: column for column in (*COLUMNS, *FURTHER)}  # of a table in the page
TITLES["energy"] = dataclasses.replace(TITLES["energy"], form=".4f")
Places = dict[str, dict[int, dict]]
"""The row of each seed, by the name of the row."""


def draw_trade_off(lines: Lines, path: Path) -> None:
    """Toxicity against similarity (the paper's Fig. 1): a point for each generation and seed.

    Later generations are darker.
    """
    figure, axes = plt.subplots(figsize=(7.5, 3.7), layout="constrained")
    for place, (name, points) in enumerate(lines.items()):
        for m, rows in enumerate(points.values()):
            look = {"color": COLOURS[place % 6], "marker": MARKERS[place % 6]}
            look |= {"alpha": (m + 1) / len(points)}
            if name in LEVELS:
                look |= {"color": LEVELS[name][0], "marker": "*", "s": 120}
            x, y = ([row[key] for row in rows] for key in ("similarity", "toxicity"))
            axes.scatter(x, y, label=name if m == len(points) - 1 else None, linewidths=0, **look)
    nearer = "(better: nearer to Target)"
    axes.set(xlabel=f"similarity {nearer}", ylabel=f"toxicity {nearer}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    save(figure, path)


def draw_histograms(counts: dict[str, torch.Tensor], path: Path) -> None:
    """Shares of texts by toxicity (the paper's Fig. 3): counts [bins] of [0, 1], by name."""
    figure, axes = plt.subplots(figsize=(7.5, 3.7), layout="constrained")
    for place, (name, numbers) in enumerate(counts.items()):
        edges = torch.linspace(0, 1, len(numbers) + 1)
        axes.stairs(numbers / numbers.sum(), edges, label=name, lw=1.5, color=COLOURS[place])
    axes.set(xlabel="toxicity", ylabel="share of texts", yscale="log")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    save(figure, path)


def rows_of(places: Places, title: str, task: str = "") -> list[dict]:
    """The row of each seed; for "A → B" what every number changes by from A to B."""
    before, _, after = title.partition(" → ")
    old, new = places.get(task + before, {}), places.get(task + after, {})
    if not after:
        return list(old.values())
    changes = []
    for seed in sorted(old.keys() & new.keys()):
        a, b = old[seed], new[seed]
        both = [key for key in a.keys() & b.keys() if isinstance(a[key], float)]
        changes.append({key: b[key] - a[key] for key in both if b[key] is not None})
    return changes


def fill(page: str, places: Places) -> str:
    """The page, the numbers of its tables made anew; those of a row without runs are left out."""
    for block in re.finditer(r"<!-- table (\w+- )?-->\n(.*?)<!-- end -->", page, re.DOTALL):
        head, rule, *rows = block[2].splitlines()
        titles = [one.strip() for one in head.split("|")[2:-1]]
        shown = [TITLES.get(title, Column(title, title, ".3f", "a score")) for title in titles]
        lines = [head, rule]
        for row in rows:
            title = row.split("|")[1].strip()
            found = rows_of(places, title, (block[1] or "").strip())
            cells = [mean_cell(found, column) if found else "" for column in shown]
            lines.append(f"| {title} | {' | '.join(cells)} |")
        table = "".join(f"{line}\n" for line in lines)
        page = page.replace(block[0], block[0].replace(block[2], table))
    return page


def draw_study(places: Places, folder: Path, rules: Sequence[str], sizes: Sequence[str]) -> None:
    """The learners of both tasks by generation, the scores of `paper` by rule of resampling, and
    the paper's Fig. 1 to 3, the second by sizes K of populations."""
    panels = {}
    for task, key, title in (("", "toxicity", "Toxic stories"), ("sad-", "log_phi", "Sad stories")):
        lines: Lines = {name: {"": rows_of(places, f"paper {name}", task)} for name in LEVELS}
        for name in LEARNERS:
            lines[name] = {str(m): rows_of(places, f"{name} {m}", task) for m in range(3)}
        if not lines["paper"]["0"]:
            continue
        by_rule = {"Target": lines["Target"]}
        for rule in rules:
            pairs = lines["paper"].items()  # the rows of each generation
            by_rule[rule] = {m: [{key: row.get(rule)} for row in rows] for m, rows in pairs}
        panels[title] = key, by_rule
        for name in ("dpo-ten", "grpo-ten", "rl"):
            if rows := rows_of(places, f"{name} 0", task):
                lines[name] = {name: rows}
        by_generation = {title: (key, lines), "Proposal": (KL, lines)}
        draw_panels(by_generation, folder / f"{task}generations.png")
    draw_panels(panels, folder / "rules.png")
    # The paper's Fig. 1 to 3, of the first task.
    lines = {name: {"": rows_of(places, f"paper {name}")} for name in LEVELS}
    for name in TRADED:
        found = {str(m): rows_of(places, f"{name} {m}") for m in range(3)}
        lines[name] = {m: rows for m, rows in found.items() if rows}
    draw_trade_off(lines, folder / "trade-off.png")
    counts = {}
    for label, name in SIGMAS.items():
        if rows := rows_of(places, name):
            counts[label] = torch.tensor([row["counts"] for row in rows]).sum(0)  # [BINS]
    draw_histograms(counts, folder / "histograms.png")
    by_size: Lines = {"Target": lines["Target"]}
    for m, name in itertools.product("012", ("paper", "pooled")):
        rows = rows_of(places, f"{name} {m}")
        found = {K: [{"toxicity": row.get(f"K = {K}")} for row in rows] for K in sizes}
        by_size[f"{name} {m}"] = found
    draw_panels({"Toxic stories": ("toxicity", by_size)}, folder / "particles.png", "Particles K")
