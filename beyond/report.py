"""The tables and figures of docs/results.md, from the records that `study.py` keeps.

A table of a page, between <!-- table --> and <!-- end -->, says itself what it shows: a row is
"NAME M", "generation M (NAME)", "Base (NAME)" or "any words <!-- NAME M -->", of the runs NAME, or
"A → B", the change from A to B within each seed, and a column has a title of COLUMNS. Behind
<!-- table sad- --> the runs are sad-NAME. A number, and a point of a figure, is the mean over seeds
with its 95 % interval (Student's t).
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import torch

os.environ["MPLBACKEND"] = "agg"  # that of a notebook may not be installed here
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from beyond.levels import STEPS
from beyond.two_sided import THRESHOLDS
from eval import evaluate
from tinystories.load import read_json
from tsmc.estimate import Estimate, mean_estimate

COLUMNS = evaluate.COLUMNS | {  # title and form by key; these only a study shows
    "log_z_hat_mean": ("log Z-hat", ".2f"),  # of single runs that are alive
    "kl_target_model": ("KL(sigma, p^(m))", ".2f"),  # without its twist
    "kl_samples": ("KL of samples", ".2f"),  # KL of a draw of runs without draws of p, until 1.1
    "draw 10": ("KL of a draw, K = 10", ".2f"),
    "draw 50": ("KL of a draw, K = 50", ".2f"),
    "kl_fresh": ("KL, fresh", ".2f"),  # by other exact samples, drawn after all tuning
    "weighted_score": ("score, weighted", ".3f"),  # mean over runs of K, weighted to sigma
    # Of what line 3 learns from: different texts, and (until 0.20) different first five tokens.
    "distinct_texts": ("distinct texts distilled", ",.0f"),
    "beginnings": ("beginnings distilled", ",.0f"),
    "scores": ("scores", ",.0f"),  # texts that phi has scored up to here
    "log_z_held": ("share held", ".2f"),  # of intervals of log Z, those that hold Target's
    "log_z_width": ("width", ".2f"),
    "worth": ("effective texts per score", ".3f"),  # 1 / sum W^2 over R K
    "core_seconds": ("core seconds", ",.0f"),  # of the whole job
    "acceptance_rate": ("acceptance rate", ".3%"),  # of rejection
}
for t in STEPS:  # share of beginnings of t tokens that are good
    COLUMNS[f"good {t}"] = (f"good, t = {t}", ".2f")
for rule in THRESHOLDS:  # E[log Z-hat], the same of runs that hold a sample, and what follows
    COLUMNS[f"below, {rule}"] = (f"log Z-hat, {rule}", ".2f")
    COLUMNS[f"above, {rule}"] = (f"holding a sample, {rule}", ".2f")
    COLUMNS[f"draw, {rule}"] = (f"KL of a draw at most, {rule}", ".2f")
DRAWN = (5, 10, 20, 50, 100, 200)  # K of runs that a draw is taken from
TITLES = {title: (key, form) for key, (title, form) in COLUMNS.items()}
LEVELS = {"Base": ":", "Target": "--"}  # horizontal lines
TASKS = {"toxic stories": "", "sad stories": "sad-"}  # how the names of their runs begin
TRADED = ("paper", "pooled", "dpo-full", "grpo-best", "rl")
SIGMAS = {"p (beta = 0)": "paper Base", "beta = 1": "beta-1 Target", "beta = 10": "paper Target"}
Rows = dict[str, dict[int, dict]]  # the row of each seed, by the name of the row
Lines = dict[str, list[tuple]]  # by name the points: x or its key, the name of a row, the key of y


def read_records(folder: Path) -> Rows:
    """The rows "NAME M", "NAME Base", "NAME Target" and "p best of 50" of all records."""
    rows: Rows = {}
    for record in map(read_json, sorted(folder.glob("*.json"))):
        name = record["name"]
        found = {f"{name} {m}": row for m, row in enumerate(record["generations"])}
        found[f"{name} Base"] = record["base"] | {"acceptance_rate": 1.0}  # the target of beta = 0
        for row in found.values():
            row |= {f"K = {size}": score for size, score in row.get("populations", {}).items()}
            row |= {f"draw {size}": kl for size, kl in row.get("draws", {}).items()}
            row.setdefault("draw 50", row.get(evaluate.DRAW))  # the table's K is 50
        for m, by_rule in enumerate(record.get("rules", [])):
            row = found[f"{name} {m}"]
            row |= {rule: numbers["score"] for rule, numbers in by_rule.items()}
            row.setdefault("every_step", row.get("multinomial, every step"))
        target = record.get("target")
        for row in [one for one in record["generations"] if "log_z" in one]:
            # Until 0.20 the error was kept, of 40 runs.
            below = row.get("log_z_half_width") or 2.02 * row["log_z_std_error"]
            above = row.get("log_z_above", below)
            row["log_z_width"] = below + above
            if target:
                row["log_z_held"] = float(-above <= row["log_z"] - target["log_z"] <= below)
        if target:
            for row in found.values():
                for rule in [one for one in THRESHOLDS if f"above, {one}" in row]:
                    row[f"draw, {rule}"] = row[f"above, {rule}"] - target["log_z"]
            found[f"{name} Target"] = target | {"acceptance_rate": math.exp(target["log_z"])}
        for title, counts in record.get("histograms", {}).items():
            shares = {f"share {n}": count / sum(counts) for n, count in enumerate(counts)}
            found[f"{name} {title}"] |= shares
        if "best_of" in record:  # by version 0.20: of texts of p, whatever the job has learned
            found[f"{'sad-' if 'sad-' in name else ''}p best of 50"] = record["best_of"]
        for title, row in found.items():
            rows.setdefault(title, {})[record["seed"]] = row
    return rows


def mean_of(rows: Rows, title: str, key: str) -> Estimate | None:
    """The mean of a number of a row over the seeds that have it, or None; for "A → B" of what it
    changes by from A to B."""
    first, _, second = title.partition(" → ")
    old, new = rows.get(first, {}), rows.get(second or first, {})
    pairs = [(old[seed].get(key), new[seed].get(key)) for seed in old.keys() & new.keys()]
    values = [b - a if second else a for a, b in pairs if a is not None and b is not None]
    if not values:
        return None
    return mean_estimate(torch.tensor(values, dtype=torch.float64))


def fill(page: str, rows: Rows) -> str:
    """The page, the numbers of its tables made anew; those of a row without runs are left out."""
    blocks = re.finditer(r"<!-- table (\w+-)? ?-->\n(.*?)<!-- end -->", page, re.DOTALL)
    for block in reversed(list(blocks)):  # so that the places of those before stay
        head, rule, *old = block[2].splitlines()
        titles = [title.strip() for title in head.split("|")[2:-1]]
        lines = [head, rule]
        for name in [line.split("|")[1].strip() for line in old]:
            cells = [name]
            row = re.sub(r".*<!-- ([\w-]+ \w+) -->", r"\1", name)  # behind words of its own
            row = re.sub(r"(?:generation )?(\w+) \(([\w-]+)\)", r"\2 \1", row)
            row = " → ".join((block[1] or "") + part for part in row.split(" → "))
            for title in titles:
                key, form = TITLES.get(title, (title, ".3f"))
                mean = mean_of(rows, row, key)
                cells.append(format(mean.value, form) if mean else "")
                # Not of one seed, nor where all are equal, nor of numbers that are 0 or 1.
                if mean and 1e-12 < mean.std_error < math.inf and key != "log_z_held":
                    cells[-1] += f" ± {format(mean.half_width(), form)}"
            lines.append(f"| {' | '.join(cells)} |")
        page = page[: block.start(2)] + "\n".join([*lines, ""]) + page[block.end(2) :]
    return page


def draw(rows: Rows, panels: dict[str, Lines], path: Path, **settings: Any) -> None:
    """A figure: the lines of each panel by its title, and settings of all axes."""
    figure = Figure(figsize=(7.5, 3.7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        curves = [name for name in lines if name not in LEVELS]  # a colour each in all panels
        for name, points in lines.items():
            known = []  # x, y and half of the interval of y, which is infinite of one seed
            for x, row, key in points:
                if mean := mean_of(rows, row, key):
                    x = mean_of(rows, row, x).value if isinstance(x, str) else x
                    known.append((x, mean.value, mean.half_width()))
            if name in LEVELS and known:
                axes.axhline(known[0][1], label=name, color="black", linestyle=LEVELS[name])
            elif known:
                n = curves.index(name)
                look = {"marker": "os^DvPX"[n % 7], "color": f"C{n}", "capsize": 3, "label": name}
                axes.errorbar(*zip(*known, strict=True), **look)
        axes.set(title=title, **settings)
        axes.grid(alpha=0.3)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)


def draw_study(rows: Rows, folder: Path, rules: list[str]) -> None:
    """Figures by rule of resampling and by K, and the paper's Fig. 1 to 3."""
    panels: dict[str, Lines] = {}
    for title, prefix, key in (("toxicity", "", "toxicity"), ("log phi", "sad-", "log_phi")):
        panels[title] = {"Target": [(0, f"{prefix}paper Target", key)]}
        for rule in rules:
            panels[title][rule] = [(m, f"{prefix}paper {m}", rule) for m in range(3)]
    draw(rows, panels, folder / "rules.png", xlabel="generation", xticks=range(3))
    panels = {}
    for stories, prefix in (TASKS | {"SmolLM2": "smollm2-"}).items():
        panels[f"KL of a draw, {stories}"] = lines = {}
        base = f"{prefix}{'paper' if stories in TASKS else 'pooled'} Base"  # that was measured
        lines["p"] = [(size, base, f"draw {size}") for size in DRAWN]
        for name in ("paper 0", "paper 2", "pooled 0", "pooled 2"):
            lines[name] = [(size, prefix + name, f"draw {size}") for size in DRAWN]
    draw(rows, panels, folder / "draws.png", xlabel="particles", xscale="log")
    lines = {name: [("similarity", f"{name} {m}", "toxicity") for m in range(3)] for name in TRADED}
    for name, row in (("p", "paper Base"), ("sigma", "paper Target")):
        lines[name] = [("similarity", row, "toxicity")]
    draw(rows, {"toxicity": lines}, folder / "trade-off.png", xlabel="similarity")
    lines = {"Target": [(0, "paper Target", "toxicity")]}
    for name in [f"{learner} {m}" for m in range(3) for learner in ("paper", "pooled")]:
        lines[name] = [(size, name, f"K = {size}") for size in (20, 50, 100, 1000)]
    draw(rows, {"toxicity": lines}, folder / "particles.png", xlabel="particles", xscale="log")
    lines = {}
    for name, row in SIGMAS.items():
        lines[name] = [((n + 0.5) / 20, row, f"share {n}") for n in range(20)]
    panels = {"share of texts": lines}
    draw(rows, panels, folder / "histograms.png", xlabel="toxicity", yscale="log")
