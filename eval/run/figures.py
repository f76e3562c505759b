"""The figures of one run: similarity against toxicity, the learning curves of the twist, and toxicity histograms.

Every function takes numbers that were computed elsewhere and writes one PNG. Colours are those of Okabe and Ito, which
colour-blind readers can tell apart; each series has a marker or line style of its own as well.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from eval.run.directory import RunDirectory
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
    """Base, Target and the generations, joined in order; up and to the left is better (paper, figure 1)."""
    figure, axes = plt.subplots(figsize=(5, 4))
    for name, colour, marker in (("base", "#555555", "X"), ("target", "black", "*")):
        if name not in results:
            continue
        row = results[name]
        style = {"color": colour, "marker": marker, "s": 110, "label": name.title(), "zorder": 3}
        axes.scatter(row["similarity"], row["toxicity"], **style)
    rows = results["generations"]
    axes.plot([row["similarity"] for row in rows], [row["toxicity"] for row in rows], color="#999999", lw=1, zorder=1)
    for row in rows:
        m = row["generation"]
        style = {"color": COLOURS[m % 6], "marker": MARKERS[m % 6], "ms": 7, "capsize": 3, "label": f"Generation {m}"}
        axes.errorbar(row["similarity"], row["toxicity"], yerr=row["toxicity_half_width"], ls="none", **style)
    axes.set(xlabel="Similarity", ylabel="Toxicity", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def smooth(values: list[float], width: int) -> np.ndarray:
    """Running mean over `width` values."""
    return np.convolve(values, np.ones(width) / width, mode="valid")


def learning_curves(records: list[dict], path: Path) -> None:
    """Loss of every update and ESS of every batch drawn for the twist, faint as they are and bold as running means."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5))
    labels = {"loss": ("Update", "Loss"), "ess": ("Batch", "ESS of the weights")}
    for axes, (key, (unit, label)) in zip(panels, labels.items(), strict=True):
        for m in sorted({record["generation"] for record in records}):
            values = [record[key] for record in records if record["generation"] == m and key in record]
            width = max(1, len(values) // 20)
            axes.plot(values, color=COLOURS[m % 6], alpha=0.2, lw=0.7)
            places = np.arange(len(values) - width + 1) + width / 2
            style = {"color": COLOURS[m % 6], "ls": DASHES[m % 4], "label": f"Generation {m}"}
            axes.plot(places, smooth(values, width), **style)
        axes.set(xlabel=unit, ylabel=label)
        axes.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[1].legend()
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


def draw_figures(results: list[dict], run: RunDirectory) -> None:
    """The three figures of a run from its results after each prompt, its metrics.jsonl and its samples."""
    if not run.writes:
        return
    learning = [record for record in run.read_metrics() if record["phase"].startswith(("twist learning", "round"))]
    learning_curves(learning, run.path / "figures" / "twist-learning.png")
    for number, result in enumerate(results, 1):
        name = "" if number == 1 else f"prompt-{number}"
        folder = run.path / "figures" / name
        similarity_toxicity(result, folder / "similarity-toxicity.png")
        scores: dict[str, list[float]] = {}
        for row in run.samples:
            if row["prompt"] == name:
                scores.setdefault(row["source"].capitalize(), []).append(row["toxicity"])
        toxicity_histogram(scores, folder / "toxicity-histogram.png")
