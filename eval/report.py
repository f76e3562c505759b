"""The numbers of a study, and the tables and figures made of them (`eval/intervals.py`: intervals).

Every row of results.json stands for a place: a table, a name and a generation. It holds each number
as [mean, low, high] over the seeds, the seeds, and some texts; a star in a table marks a word whose
share differs from that of the exact samples.
"""

import itertools
import math
import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from eval.baseline import METHODS
from eval.figures import COLOURS, DASHES, ENDS, MARKERS, save_figure
from eval.intervals import COMPARED, Place, Seeds, change, differs, numbers_of
from eval.measure import ROOT
from eval.parts import ABLATIONS, LEARNERS, Part

COLUMNS = {  # quantity: title, format; others are shown under their own name
    "energy": ("energy", ".4f"),
    "kl": ("KL(sigma, q)", ".2f"),
    "log_z_hat_mean": ("log Z-hat", ".2f"),
    "scores": ("scores", ",.0f"),
    "exact_texts": ("exact texts for them", ".0f"),
    "ess_per_score": ("effective texts per score", ".3f"),
    "gain": ("times rejection", ",.0f"),
    "seconds": ("core seconds", ".0f"),
    "accepted": ("accepted", ".3%"),
    "num_sequences": ("texts", ".0f"),
    "learning_rate": ("step size", ".2g"),
    "strength": ("b", ".2g"),
    "tried": ("settings tried", ".0f"),
    "inside": ("best inside (1: yes)", ".0f"),
}
CHANGED = ("toxicity", "energy", "kl", "log_z_hat_mean")
TABLES = {  # name: columns; None: all of its rows' quantities
    "samples": COMPARED[:-1],
    "changes": CHANGED,
    "ablations": COMPARED[:-1],
    "ingredients": CHANGED,  # what each of them changes
    "settings": ("learning_rate", "strength", "tried", "inside", "energy"),
    "baselines": CHANGED,  # changes from a learner to each of them
    "populations": None,
    "cost": ("scores", "exact_texts", "ess_per_score", "gain", "seconds"),
    "beta": ("accepted", "toxicity", "similarity", "num_sequences"),
    "words": None,
}


def by_place(parts: dict[Part, dict]) -> dict[Place, Seeds]:
    """The rows of all parts by place and seed, and what follows from them."""
    places: dict[Place, Seeds] = defaultdict(dict)
    for part, result in parts.items():
        for row in result["rows"]:
            place = (row["name"], row.get("generation"))
            places[row["table"], *place][part.seed] = row
            if row["table"] == "samples" and "words" in row:
                places["words", *place][part.seed] = row["words"]
            if row["table"] == "samples" and "scores" in row:
                spent = {name: row[name] for name in ("scores", "ess_per_score") if name in row}
                places["cost", *place][part.seed] = spent | {"seconds": result["seconds"]}
        if part.kind == "sweep":
            best = next(row for row in result["rows"] if row["setting"] == result["best"])
            found = {name: best.get(name) for name in ("learning_rate", "strength", "energy")}
            found |= {"tried": len(result["rows"]), "inside": float(result["inside"])}
            places["settings", part.method, None][part.seed] = found
    z = math.exp(target_of(places)["log_z"])
    for row in (row for place in places if place[0] == "cost" for row in places[place].values()):
        row["exact_texts"] = z * row["scores"]
        if "ess_per_score" in row:
            row["gain"] = row["ess_per_score"] / z
    return places


def target_of(places: dict[Place, Seeds], table: str = "samples") -> dict:
    """The row of Target."""
    return next(iter(places[table, "Target", None].values()))


def label(name: str, m: int | None) -> str:
    """Name and generation."""
    return name + ("" if m is None else f", generation {m}")


def comparisons(places: dict[Place, Seeds]) -> list[tuple[Place, Place]]:
    """Before and after of each change."""
    last = max(place[2] or 0 for place in places)
    pairs = []
    for name in LEARNERS:
        generations = [("samples", name, m) for m in range(last + 1)]
        pairs += [*itertools.pairwise(generations), (generations[0], generations[-1])]
    ends = {name: ("samples", name, last) for name in LEARNERS | ABLATIONS}
    pairs += itertools.pairwise(ends[name] for name in LEARNERS)
    pairs.append((ends["pooled"], ends["no-surrogate"]))
    pairs += [(ends["default"], ends[name]) for name in ("no-effective-potential", "lora")]
    baselines = [("samples", method, None) for method in METHODS]
    pairs += itertools.product((ends["default"], ends["pooled"]), baselines)
    return list(dict.fromkeys(pairs))


def add_population_changes(places: dict[Place, Seeds]) -> None:
    """From generation 0 with the largest K to the last generation with the smallest."""
    last = max(place[2] or 0 for place in places)
    for name in LEARNERS:
        many, few = places["populations", name, 0], places["populations", name, last]
        sizes = [key for key in next(iter(few.values()), {}) if key.startswith("K = ")]
        if sizes:
            title = f"{name}, {sizes[-1]}, generation 0 → {sizes[0]}, generation {last}"
            places["changes", title, None] = {
                seed: {"toxicity": few[seed][sizes[0]] - many[seed][sizes[-1]]}
                for seed in sorted(few)
            }


def summarise(parts: dict[Part, dict]) -> dict:
    """results.json: what made the numbers, and those of every row as [mean, low, high]."""
    places = by_place(parts)
    target, words = target_of(places), target_of(places, "words")
    for before, after in comparisons(places):
        end = after[2] if before[1] == after[1] else label(*after[1:])
        title = f"{label(*before[1:])} → {end}"
        places["changes", title, None] = change(places[before], places[after])
    add_population_changes(places)
    rows = []
    for place, by_seed in places.items():
        if not by_seed:
            continue
        each = [*by_seed.values()]
        row = dict(zip(("table", "name", "generation"), place, strict=True), seeds=[*by_seed])
        row["numbers"] = numbers_of(place, each, target["log_z_half_width"])
        if place[0] in ("samples", "beta"):
            row |= {name: each[0].get(name, []) for name in ("texts", "histogram")}
        if place[0] == "words" and len(each) > 1:
            sizes = (target["num_sequences"], 0.05 / len(words))
            row["differs"] = [
                word
                for word, exact in words.items()
                if differs([one[word] for one in each], exact, *sizes)
            ]
        rows.append(row)
    return {"version": version(), "commit": commit(), "rows": rows}


def version() -> str:
    """The version of this project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["version"]


def commit() -> str:
    """The commit of the code, with "-dirty" where it has been changed since; empty without git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def cell(row: dict, name: str) -> str:
    """A number with its interval."""
    if name not in row["numbers"]:
        return ""
    form = COLUMNS.get(name, (name, ".3f"))[1]
    value, *limits = (format(number, form) for number in row["numbers"][name])
    value += "*" if name in row.get("differs", []) else ""
    return value if not limits or limits[0] == limits[1] else f"{value} ({' to '.join(limits)})"


def markdown(rows: list[dict], names: tuple[str, ...] | None) -> str:
    """A table in Markdown."""
    names = names or tuple(dict.fromkeys(name for row in rows for name in row["numbers"]))
    lines = [["", *(COLUMNS.get(name, (name,))[0] for name in names)], ["---"] * (len(names) + 1)]
    for row in rows:
        named = label(row["name"], row["generation"])
        lines.append([named, *(cell(row, name) for name in names)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(row: dict) -> str:
    """The table in which a row is shown; words of ablations are in results.json alone."""
    last = row["name"].split(" → ")[-1].split(",")[0]
    if last in ABLATIONS:
        moved = {"samples": "ablations", "changes": "ingredients", "words": "words of ablations"}
        return moved.get(row["table"], row["table"])
    return "baselines" if last in METHODS and row["table"] == "changes" else row["table"]


def tables(results: dict) -> dict[str, str]:
    """The tables in Markdown by name, and "texts": one for each beta and each last generation."""
    rows = defaultdict(list)
    for row in results["rows"]:
        rows[table_of(row)].append(row)
    shown = {name: markdown(rows[name], columns) for name, columns in TABLES.items()}
    examples = {f"beta {row['name']}": row["texts"][0] for row in rows["beta"]}
    examples |= {row["name"]: row["texts"][0] for row in rows["samples"] if row["name"] in LEARNERS}
    lines = [f"- {name}: *{' '.join(text.split())}*" for name, text in examples.items()]
    return shown | {"texts": "\n".join(lines)}


def fill(page: str, results: dict) -> str:
    """The page with the tables between their markers, <!-- table NAME --> and <!-- end -->."""
    shown = tables(results)

    def replaced(found: re.Match) -> str:
        return f"<!-- table {found[1]} -->\n{shown[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def draw_lines(axes: plt.Axes, lines: dict[str, list], **labels) -> None:
    """Lines with error bars by name, through points (x, [value] or [mean, low, high])."""
    for number, (name, points) in enumerate(lines.items()):
        x, y = zip(*((x, y if len(y) == 3 else y * 3) for x, y in points), strict=True)
        middle, low, high = np.array(y).T
        # The second six have the colours of the first, with other markers.
        look = (COLOURS[number % 6], MARKERS[(number + number // 6) % 6])
        colour, marker = ENDS.get(name, look)
        bars = np.maximum(0, (middle - low, high - middle))
        style = {"color": colour, "marker": marker, "ls": DASHES[number % 4], "capsize": 3}
        axes.errorbar(x, middle, bars, label=name, **style)
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def draw_figures(results: dict, folder: Path) -> None:
    """The paper's Fig. 1 and 2, KL(sigma||q) by generation, and histograms by beta."""
    plane, kl, populations = defaultdict(list), defaultdict(list), defaultdict(dict)
    target = 0.0
    figure, by_beta = plt.subplots(figsize=(6, 4))
    for row in results["rows"]:
        numbers, name, m = row["numbers"], row["name"], row["generation"]
        if row["table"] == "samples" and name not in ABLATIONS and "toxicity" in numbers:
            plane[name].append((numbers["similarity"][0], numbers["toxicity"]))
            if name in LEARNERS:
                kl[name].append((m, numbers["kl"]))
            if name == "Target":
                target = numbers["toxicity"][0]
        elif row["table"] == "populations":
            points = [(int(key.split()[-1]), value) for key, value in numbers.items()]
            populations[name][f"Generation {m}"] = points
        elif row["table"] == "beta":
            by_beta.stairs(row["histogram"], np.linspace(0, 1, 21), label=f"beta {name}", lw=2)
    by_beta.set(xlabel="Toxicity", ylabel="Share of texts", yscale="log")
    by_beta.legend()
    save_figure(figure, folder / "beta.png")
    figure = plt.figure(figsize=(6, 5))
    draw_lines(figure.subplots(), plane, xlabel="Similarity", ylabel="Toxicity")
    save_figure(figure, folder / "similarity-toxicity.png")
    figure = plt.figure(figsize=(5, 4))
    axes = figure.subplots()
    draw_lines(axes, kl, xlabel="Generation", ylabel="KL(sigma, q)", ylim=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, folder / "kl.png")
    figure, panels = plt.subplots(1, len(LEARNERS), figsize=(11, 4), layout="constrained")
    for axes, name in zip(panels, LEARNERS, strict=True):
        axes.axhline(target, color="black", label="Target")
        labels = {"xlabel": "Particles K", "ylabel": "Toxicity", "xscale": "log"}
        draw_lines(axes, populations[name], title=name, **labels)
    save_figure(figure, folder / "populations.png")
