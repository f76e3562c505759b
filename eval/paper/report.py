"""The report of a study: one HTML page with everything in it, and its three figures as PNG.

Nothing is computed here; the tables and their captions are in report.html.
"""

import base64
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes

from eval.paper.numbers import TARGET, Number, Numbers, Place, collect, write_results
from eval.paper.study import BASELINES, METHODS, Study
from eval.run.figures import COLOURS, DASHES, MARKERS, save_figure
from tinystories.checkpoint import read_json, write_text


def style(number: int, **more) -> dict:
    """Colour, marker and line of a series."""
    own = {"color": COLOURS[number % 6], "marker": MARKERS[number % 6], "ls": DASHES[number % 4]}
    return own | more


def draw_line(axes: Axes, across: list[Number], up: list[Number], **options) -> None:
    """Numbers against numbers, with error bars for those that have an interval."""
    x, x_low, x_high = np.array([number[:3] for number in across], dtype=float).T
    y, y_low, y_high = np.array([number[:3] for number in up], dtype=float).T
    bars = {"xerr": (x - x_low, x_high - x), "yerr": (y - y_low, y_high - y)}
    axes.errorbar(x, y, **bars, capsize=3, **options)


def draw_point(axes: Axes, row: dict[str, Number], **options) -> None:
    """A row on the plane of similarity and toxicity."""
    draw_line(axes, [row["similarity"]], [row["toxicity"]], ls="none", **options)


def by_generation(numbers: Numbers, variant: str, quantity: str) -> list[Number]:
    """The means of a quantity, generation by generation."""
    return [row[quantity] for place, row in numbers.table("generations") if place.name == variant]


def similarity_toxicity(axes: Axes, study: Study, numbers: Numbers) -> None:
    """Base, Target, generations of the methods, baselines with their sweep (paper, Fig. 1)."""
    for number, method in enumerate(BASELINES):
        marks = {"color": COLOURS[number + 2], "marker": MARKERS[number], "fillstyle": "none"}
        for place, row in numbers.table("sweep", "best"):
            if place.name.startswith(method) and "toxicity" in row:
                more = {"label": method, "ms": 9} if place.section == "best" else {"alpha": 0.3}
                draw_point(axes, row, **marks, **more)
    for number, variant in enumerate(METHODS):
        x, y = (by_generation(numbers, variant, name) for name in ("similarity", "toxicity"))
        draw_line(axes, x, y, label=variant, **style(number))
        for m in range(len(x)):
            axes.annotate(f" {m}", (x[m].value, y[m].value))
    base = numbers.rows[Place("rejection", "Base")]
    draw_point(axes, base, color="#555555", marker="X", ms=9, label="Base")
    draw_point(axes, numbers.rows[TARGET], color="black", marker="*", ms=13, label="Target")
    axes.set(xlabel="Similarity", ylabel="Toxicity", xlim=(0, 1.03), ylim=(-0.03, 1.03))


def generations(axes: Axes, study: Study, numbers: Numbers, quantity: str, title: str) -> None:
    """A quantity by generation, a line for each method."""
    for number, variant in enumerate(METHODS):
        values = by_generation(numbers, variant, quantity)
        x = [Number(m) for m in range(len(values))]
        draw_line(axes, x, values, label=variant, **style(number))
    if quantity == "log_z_hat":
        axes.axhline(numbers.rows[TARGET]["log_z"].value, color="black", lw=1, label="log Z of σ")
    else:
        axes.set_ylim(0)
    axes.set(xlabel="Generation", xticks=range(len(values)), ylabel=title)


FIGURES = {
    "similarity-toxicity": similarity_toxicity,
    "kl-generations": partial(generations, quantity="kl", title="KL(σ‖q) in nats"),
    "evidence-generations": partial(generations, quantity="log_z_hat", title="Mean of log Ẑ"),
}


def write_report(study: Study, out: Path, command: str) -> None:
    """The result files, figures and report.html of a study that `command` has finished."""
    numbers = collect(study, out)
    write_results(numbers, out)
    images = {}
    for name, draw in FIGURES.items():
        figure, axes = plt.subplots(figsize=(7, 4.6))
        draw(axes, study, numbers)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        path = out / "figures" / f"{name}.png"
        save_figure(figure, path)
        images[name] = base64.b64encode(path.read_bytes()).decode()
    made_by = read_json(out / "runs" / f"published-{study.seeds[0]}" / "config.json")["versions"]
    shown = {"study": study, "numbers": numbers, "images": images, "versions": made_by}
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html").render(shown, command=command)
    write_text(out / "report.html", page)
