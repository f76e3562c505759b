"""The figures of a run: similarity against toxicity, twist learning, toxicity histograms.

Every function writes one PNG. The colours are those of Okabe and Ito, which colour-blind readers
can tell apart, and each series also has a marker or line style of its own.
"""

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
    """Base, Target and the generations, joined in order (paper, Fig. 1), toxicity +- 95 %."""
    figure, axes = plt.subplots(figsize=(5, 4))
    shown = [("Base", "#555555", "X", results.get("base"))]
    shown += [("Target", "black", "*", results.get("target"))]
    for m, row in enumerate(results["generations"]):
        shown.append((f"Generation {m}", COLOURS[m % 6], MARKERS[m % 6], row))
    places = [(row["similarity"], row["toxicity"]) for *_, row in shown[2:]]
    axes.plot(*zip(*places, strict=True), color="#999999", lw=1, zorder=1)
    for name, colour, marker, row in shown:
        if row is not None:
            style = {"color": colour, "marker": marker, "ms": 8, "capsize": 3, "ls": "none"}
            error = row["toxicity_half_width"]
            axes.errorbar(row["similarity"], row["toxicity"], error, label=name, **style)
    low, high = axes.get_xlim()  # at least so wide that noise does not look like progress
    axes.set(xlim=(min(low, 0.3), max(high, 0.6)), ylim=(-0.03, 1.03))
    axes.set(xlabel="Similarity", ylabel="Toxicity", title="Mean similarity and toxicity")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def learning_curves(records: list[dict], path: Path) -> None:
    """A panel for each loss: a thin line through all batches, and its running mean.

    The legend of V has the loss, on the rows held out, of the V that was kept.
    """
    phases = ("distillation", "twist learning")  # the latter is CTL where it has an ESS
    models = [row for row in records if row["phase"] in phases and "ess" not in row]
    twists = [row for row in records if row["phase"] == "twist learning" and "ess" in row]
    values = [row for row in records if row["phase"] == "value learning"]
    panels = [("Distillation (eq. 7), nats per token", models, "loss")]
    panels += [("CTL loss", twists, "loss"), ("ESS of CTL's positive weights", twists, "ess")]
    panels += [("V: loss, which is 0 for V = 0", values, "loss")]
    panels = [panel for panel in panels if panel[1]]
    figure, places = plt.subplots(1, len(panels), figsize=(12, 3.5), squeeze=False)
    for axes, (title, own, key) in zip(places[0], panels, strict=True):
        for m in sorted({row["generation"] for row in own}):
            curve = [row for row in own if row["generation"] == m]
            each = [row[key] for row in curve]
            width = max(1, len(each) // 10)
            means = np.convolve(each, np.ones(width) / width, mode="valid")
            updates = np.arange(len(means)) + (width - 1) / 2
            name = f"Generation {m}"
            if "held_out" in curve[-1]:
                name += f", held out {curve[-1]['held_out']:.2f}"
            axes.plot(each, color=COLOURS[m % 6], alpha=0.2, lw=0.7)
            axes.plot(updates, means, color=COLOURS[m % 6], ls=DASHES[m % 4], label=name)
        axes.set(title=title, yscale="log" if key == "ess" else "linear")
        axes.set_xlabel("Update (bold: running mean)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
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
    axes.set_title("Texts by their toxicity, in bins of 0.05")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)


def draw_figures(results: dict, records: list[dict], samples: list[dict], folder: Path) -> None:
    """The three figures of a run from its results and the lines of its other two files."""
    learning_curves(records, folder / "twist-learning.png")
    similarity_toxicity(results, folder / "similarity-toxicity.png")
    scores: dict[str, list[float]] = {}
    for row in samples:
        scores.setdefault(row["source"].capitalize(), []).append(row["toxicity"])
    toxicity_histogram(scores, folder / "toxicity-histogram.png")
