"""The tables and figures of docs/results.md: `python -m eval.report runs/study docs/results.md`

It reads the results.json of every finished run NAME-SEED of `eval/study.py`, and writes the tables
between the page's markers, <!-- table NAME --> and <!-- end -->, and beside the page results.json,
with the numbers behind them, and the figures. A row stands for a name and a generation; each number
is [mean, low, high] over its seeds (`eval/intervals.py`).
"""

import itertools
import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from eval.command import OneLineParser, one_line_errors
from eval.figures import ENDS, LOOKS, save_figure
from eval.intervals import Seeds, change, numbers_of
from eval.table import named_rows, read_results
from tinystories.checkpoint import read_json, write_json, write_text
from tinystories.errors import InputError
from tsmc.estimate import Estimate

ROOT = Path(__file__).resolve().parents[1]
LEARNERS = ("paper", "weighted", "pooled")
INGREDIENTS = {"lora": "weighted", "no-effective-potential": "weighted", "no-surrogate": "pooled"}
BASELINES = ("dpo-full", "dpo-lora", "grpo-full", "grpo-lora")
TITLES = {  # quantity: title, format
    "toxicity": ("toxicity", ".3f"),
    "similarity": ("similarity", ".3f"),
    "energy": ("energy", ".4f"),
    "kl_target_proposal": ("KL(sigma, q)", ".2f"),
    "kl_target_model": ("KL(sigma, p^(m))", ".2f"),
    "log_z_hat_mean": ("log Z-hat", ".2f"),
    "ess": ("ESS", ".1f"),
    "largest_share": ("largest share", ".2f"),
    "scores": ("scores", ",.0f"),
    "worth": ("effective texts per score", ".3f"),
    "seconds": ("core seconds", ".0f"),
    "learning_rate": ("step size", ".2g"),
    "strength": ("b", ".2g"),
    "num_samples": ("exact samples", ".0f"),
    "log_z": ("log Z", ".2f"),
}
SAMPLES = ("toxicity", "similarity", "energy", "kl_target_proposal", "log_z_hat_mean")
CHANGED = ("toxicity", "energy", "kl_target_proposal", "log_z_hat_mean")
Places = dict[tuple[str, str], Seeds]  # (name, row of the table), then seed


def read_study(folder: Path) -> Places:
    """The rows of all finished runs by name, row and seed; InputError without `weighted`."""
    places: Places = defaultdict(dict)
    for path in sorted(folder.glob("*/results.json")):
        name, _, seed = path.parent.name.rpartition("-")
        results, config = read_results(path.parent), read_json(path.parent / "config.json")
        for title, row in named_rows(results).items():
            places[name, title][int(seed)] = row
        spent = {"scores": results["scores"]} | results["generations"][-1]
        if (path.parent / "seconds.json").exists():
            spent |= read_json(path.parent / "seconds.json")
        if "strength" in config:
            spent |= {key: config[key] for key in ("learning_rate", "strength")}
        places[name, "cost"][int(seed)] = spent
        for m, row in enumerate(results["generations"]):
            for size, score in row.get("populations", {}).items():
                sizes = places[name, f"populations {m}"].setdefault(int(seed), {})
                sizes[f"K = {size}"] = score
    if ("weighted", "Target") not in places:
        fault = "holds no finished run weighted-SEED with a row Target"
        raise InputError(f"{folder}: {fault}; run eval.study first")
    return places


def tables_of(places: Places) -> dict[str, dict[str, dict]]:
    """The numbers of each table by row."""
    target = next(iter(places["weighted", "Target"].values()))
    error = Estimate(0.0, target["log_z_std_error"], target["num_proposals"] - 1.0).half_width()
    generations = [title for name, title in places if name == "weighted" and "Gen" in title]
    last = generations[-1]

    def numbers(name: str, title: str) -> dict:
        return numbers_of(places[name, title], error)

    tables: dict[str, dict[str, dict]] = defaultdict(dict)
    for title in ("Base", "Target"):
        tables["samples"][title] = numbers("weighted", title)
    for name in LEARNERS:
        for title in generations:
            if (name, title) in places:
                tables["samples"][f"{name}, {title.lower()}"] = numbers(name, title)
                tables["diagnostics"][f"{name}, {title.lower()}"] = numbers(name, title)
                if sizes := places.get((name, f"populations {title[-1]}")):
                    tables["populations"][f"{name}, {title.lower()}"] = numbers_of(sizes, 0.0)
        pairs = [*itertools.pairwise(generations), (generations[0], generations[-1])]
        for before, after in dict.fromkeys(pairs):
            if (name, after) in places:
                moved = change(places[name, before], places[name, after], CHANGED)
                title = f"{name}, {before.lower()} → {after[-1]}"
                tables["changes"][title] = numbers_of(moved, 0.0, True)
    pairs = list(itertools.pairwise(LEARNERS))
    pairs += [(learner, name) for name, learner in INGREDIENTS.items()]
    for before, after in pairs:
        if (after, last) in places and (before, last) in places:
            moved = change(places[before, last], places[after, last], CHANGED)
            where = "ingredients" if after in INGREDIENTS else "changes"
            tables[where][f"{before} → {after}"] = numbers_of(moved, 0.0, True)
    for name in BASELINES:
        if (name, "Generation 0") in places:
            tables["baselines"][name] = numbers(name, "Generation 0")
            for learner in [one for one in LEARNERS if (one, last) in places]:
                moved = change(places[learner, last], places[name, "Generation 0"], CHANGED)
                tables["beside"][f"{learner} → {name}"] = numbers_of(moved, 0.0, True)
    for name, title in places:
        if title == "cost" and name.startswith("sweep"):
            tables["settings"][name] = numbers(name, title)
        elif title == "cost" and name != "beta-1":
            tables["cost"][name] = numbers(name, title)
    for beta, name in (("0", "Base"), ("10", "Target")):
        tables["beta"][beta] = numbers("weighted", name)
    if ("beta-1", "Target") in places:
        tables["beta"]["1"] = numbers("beta-1", "Target")
    return tables


COLUMNS = {
    "samples": SAMPLES,
    "diagnostics": ("kl_target_proposal", "kl_target_model", "ess", "largest_share"),
    "changes": CHANGED,
    "ingredients": CHANGED,
    "baselines": SAMPLES[:-1],
    "beside": CHANGED[:-1],
    "settings": ("learning_rate", "strength", "toxicity", "energy", "kl_target_proposal"),
    "cost": ("scores", "worth", "seconds"),
    "beta": ("toxicity", "similarity", "num_samples", "log_z"),
}


def markdown(rows: dict[str, dict], columns: tuple[str, ...]) -> str:
    """A table in Markdown; a number with its interval, if it has one."""
    columns = columns or tuple(next(iter(rows.values()), {}))
    lines = [["", *(TITLES.get(name, (name,))[0] for name in columns)]]
    lines.append(["---"] * len(lines[0]))
    for title, numbers in rows.items():
        line = [title]
        for name in columns:
            form = TITLES.get(name, (name, ".3f"))[1]
            value, *limits = [format(number, form) for number in numbers.get(name, [])] or [""]
            has_limits = bool(limits) and limits[0] != limits[1]
            line.append(f"{value} ({' to '.join(limits)})" if has_limits else value)
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(page: str, tables: dict[str, dict[str, dict]]) -> str:
    """The page with the tables between their markers; InputError for one that is not known."""

    def replaced(found: re.Match) -> str:
        if found[1] not in tables:
            raise InputError(f"table {found[1]}: there is none in the study; correct the page")
        shown = markdown(tables[found[1]], COLUMNS.get(found[1], ()))
        return f"<!-- table {found[1]} -->\n{shown}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def draw_figures(tables: dict[str, dict[str, dict]], places: Places, folder: Path) -> None:
    """Fig. 1 of the paper and KL by generation beside it; Fig. 2, a panel for each learner;
    histograms of toxicity by beta."""
    figure, (plane, kl) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for title, numbers in (tables["samples"] | tables["baselines"]).items():
        name, _, generation = title.partition(", generation ")
        colour, marker = ENDS.get(name, LOOKS.get(name.split("-")[0], ("gray", "o")))
        value, low, high = (numbers["toxicity"] * 3)[:3]
        x = numbers["similarity"][0]
        look = {"color": colour, "marker": marker, "capsize": 2}
        plane.errorbar(x, value, [[value - low], [high - value]], **look)
        plane.annotate(generation or name, (x, value), xytext=(5, 3), textcoords="offset points")
    plane.set(xlabel="Similarity", ylabel="Toxicity", title="Good: where Target is")
    for name in LEARNERS:
        rows = [row for title, row in tables["samples"].items() if title.startswith(f"{name}, ")]
        points = np.array([(row["kl_target_proposal"] * 3)[:3] for row in rows])  # [M + 1, 3]
        if len(points):
            middle, low, high = points.T
            look = {"color": LOOKS[name][0], "marker": LOOKS[name][1], "capsize": 3, "label": name}
            kl.errorbar(range(len(points)), middle, [middle - low, high - middle], **look)
            kl.set_xticks(range(len(points)))
    kl.set(xlabel="Generation", ylabel="KL(sigma, q)", title="Good: low", ylim=(0, None))
    kl.legend()
    save_figure(figure, folder / "generations.png")
    figure, panels = plt.subplots(1, len(LEARNERS), figsize=(10, 3.5), sharey=True)
    for axes, name in zip(panels, LEARNERS, strict=True):
        axes.axhline(tables["samples"]["Target"]["toxicity"][0], color="black", lw=1)
        for title, sizes in tables["populations"].items():
            if title.startswith(f"{name}, "):
                counts = sorted(int(key[4:]) for key in sizes)
                means = [sizes[f"K = {count}"][0] for count in counts]
                width = 1 + int(title[-1])
                axes.plot(counts, means, color=LOOKS[name][0], lw=width, marker="o", ms=3 + width)
                axes.annotate(
                    title[-1], (counts[0], means[0]), xytext=(-10, -3), textcoords="offset points"
                )
        axes.set(xscale="log", xlabel="Particles K", title=name)
    panels[0].set_ylabel("Toxicity (line: Target)")
    save_figure(figure, folder / "populations.png")
    figure, axes = plt.subplots(figsize=(6, 3.5))
    for beta, (name, title) in {
        "0": ("weighted", "Base"),
        "1": ("beta-1", "Target"),
        "10": ("weighted", "Target"),
    }.items():
        for row in list(places.get((name, title), {}).values())[:1]:
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
        tables = tables_of(places)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        results = {"version": project["version"], "commit": commit, "tables": tables}
        write_json(args.page.parent / "results" / "results.json", results)
        write_text(args.page, fill(args.page.read_text(encoding="utf-8"), tables))
        draw_figures(tables, places, args.page.parent / "results")


if __name__ == "__main__":
    main()
