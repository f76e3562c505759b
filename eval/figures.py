"""The figures of a job, and of a study over several seeds.

A point is a mean over seeds with its 95 % interval. The score is the toxicity where the potential
reads the classifier, else log phi. The colours, of Okabe and Ito, can be told apart by all readers.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from eval.metrics import COLUMNS, KL
from tinystories.files import replacing
from tsmc.estimate import mean_estimate

plt.switch_backend("Agg")  # needs no screen
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = "os^DvP"
LEVELS = {"Base": ("#555555", ":"), "Target": ("black", "--")}  # horizontal lines
Lines = dict[str, dict[str, list[dict]]]
"""By name, then by the label of a point, as "0" for generation 0: the row of each seed."""


def draw_lines(axes: plt.Axes, lines: Lines, key: str) -> None:
    """One number of all rows that have it over the labels of their points."""
    names = [name for name in lines if name not in LEVELS]
    labels = list(dict.fromkeys(label for name in names for label in lines[name]))
    for name, points in lines.items():
        means = {}
        for label, rows in points.items():
            values = [row.get(key) for row in rows]
            if values and None not in values:
                means[label] = mean_estimate(torch.tensor(values, dtype=torch.float64))
        if not means:
            continue
        y = [mean.value for mean in means.values()]
        if name in LEVELS:
            color, style = LEVELS[name]
            axes.axhline(y[0], label=name, lw=1.2, color=color, linestyle=style)
            continue
        # Side by side, so that no interval hides another. Of one row it is infinite: not drawn.
        place = names.index(name)
        x = [labels.index(label) + 0.05 * (place - (len(names) - 1) / 2) for label in means]
        half_widths = [mean.half_width() for mean in means.values()]
        look = {"color": COLOURS[place % 6], "marker": MARKERS[place % 6], "ms": 6}
        axes.errorbar(x, y, half_widths, capsize=3, label=name, **look)
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(alpha=0.3)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG and close it."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw_panels(
    panels: dict[str, tuple[str, Lines]], path: Path, xlabel: str = "Generation"
) -> None:
    """Numbers over the labels of their points: their key and their lines, by the panel's title."""
    shape = {"figsize": (7.5, 3.7), "squeeze": False, "layout": "constrained"}
    figure, grid = plt.subplots(1, len(panels), **shape)
    for axes, (title, (key, lines)) in zip(grid[0], panels.items(), strict=True):
        draw_lines(axes, lines, key)
        (column,) = (one for one in COLUMNS if one.key == key)
        label = f"{column.title} (better: {column.better})"
        axes.set(title=title, xlabel=xlabel, ylabel=label)
        axes.tick_params(axis="x", labelsize="small")  # names of baselines are long
        means = [y for line in axes.containers for y in line[0].get_ydata()]
        if key == KL and max(means) > 4 * min(means) > 0:
            # Baselines are far away, and intervals may reach anywhere: the means choose the axis.
            axes.set(yscale="log", ylim=(0.8 * min(means), 1.3 * max(means)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)


def draw_figures(results: dict, folder: Path) -> None:
    """The figure of a job: the score, and KL(sigma||q) where it is known."""
    key = "toxicity" if "toxicity" in results["base"] else "log_phi"
    lines: Lines = {}
    for name in LEVELS:
        if row := results.get(name.lower()):
            lines[name] = {"": [row]}
    lines[results["learner"]] = {str(m): [row] for m, row in enumerate(results["generations"])}
    panels = {"Score of the samples": (key, lines)}
    if KL in results["generations"][0]:
        panels["Proposal"] = KL, lines
    draw_panels(panels, folder / "figures" / "generations.png")
