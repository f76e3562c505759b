"""The figures of a run: similarity against toxicity, twist learning, toxicity histograms.

Every function takes numbers that were computed elsewhere and writes one PNG. The colours are those
of Okabe and Ito, which colour-blind readers can tell apart, and each series also has a marker or
line style of its own.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from tinystories.checkpoint import replacing

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":")


def save_figure(figure, path: Path) -> None:
    """Write the PNG whole or not at all and free the figure."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def similarity_toxicity(results: dict, path: Path) -> None:
    """Base, Target and the generations, joined in order (paper, Fig. 1)."""
    figure, axes = plt.subplots(figsize=(5, 4))
    for name, colour, marker in (("base", "#555555", "X"), ("target", "black", "*")):
        if name in results:
            row = results[name]
            style = {"color": colour, "marker": marker, "s": 110, "zorder": 3}
            axes.scatter(row["similarity"], row["toxicity"], label=name.title(), **style)
    rows = results["generations"]
    places = [(row["similarity"], row["toxicity"]) for row in rows]
    axes.plot(*zip(*places, strict=True), color="#999999", lw=1, zorder=1)
    for m, row in enumerate(rows):
        style = {"color": COLOURS[m % 6], "marker": MARKERS[m % 6], "ms": 7, "capsize": 3}
        style |= {"yerr": row["toxicity_half_width"], "ls": "none", "label": f"Generation {m}"}
        axes.errorbar(*places[m], **style)
    axes.set(xlabel="Similarity", ylabel="Toxicity", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def learning_curves(records: list[dict], path: Path) -> None:
    """Two panels of every update by generation, faint, and their running means, bold.

    With the pool the losses of the adapters and of V, else the loss and the ESS of CTL.
    """
    ctl = [record for record in records if record["phase"] == "twist learning" and "ess" in record]
    is_pooled = not ctl
    adapters = ("twist learning", "distillation") if is_pooled else ("twist learning",)
    shown = [("Loss", adapters, "loss"), ("ESS of the weights", adapters, "ess")]
    if is_pooled:
        shown[1] = ("Loss of V", ("value learning",), "loss")
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5))
    for axes, (label, phases, key) in zip(panels, shown, strict=True):
        own = [record for record in records if record["phase"] in phases]
        for m in sorted({record["generation"] for record in own}):
            values = [record[key] for record in own if record["generation"] == m]
            width = max(1, len(values) // 20)
            means = np.convolve(values, np.ones(width) / width, mode="valid")
            places = np.arange(len(means)) + width / 2
            style = {"color": COLOURS[m % 6], "ls": DASHES[m % 4], "label": f"Generation {m}"}
            axes.plot(values, color=COLOURS[m % 6], alpha=0.2, lw=0.7)
            axes.plot(places, means, **style)
        axes.set(xlabel="Update", ylabel=label)
        axes.grid(alpha=0.3)
    panels[0].legend()
    panels[1].set_yscale("linear" if is_pooled else "log")
    save_figure(figure, path)


def toxicity_histogram(toxicity: dict[str, list[float]], path: Path) -> None:
    """Share of texts by p(toxic | s), logarithmic, of each named set."""
    figure, axes = plt.subplots(figsize=(6, 4))
    edges = np.linspace(0, 1, 21)
    for i, (name, values) in enumerate(toxicity.items()):
        shares = np.histogram(values, edges)[0] / len(values)
        colour = {"Base": "#555555", "Target": "black"}.get(name, COLOURS[(i - 2) % 6])
        axes.stairs(shares, edges, color=colour, label=name, lw=2, ls=DASHES[i % 4])
    axes.set(xlabel="Toxicity p(toxic | s)", ylabel="Share of texts", yscale="log", xlim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def draw_figures(results: dict, samples: list[dict], run: Path) -> None:
    """The three figures of a run from its results, its metrics.jsonl and its samples."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    folder = run / "figures"
    learning_curves(records, folder / "twist-learning.png")
    similarity_toxicity(results, folder / "similarity-toxicity.png")
    scores: dict[str, list[float]] = {}
    for row in samples:
        scores.setdefault(row["source"].capitalize(), []).append(row["toxicity"])
    toxicity_histogram(scores, folder / "toxicity-histogram.png")
