"""The figures of a run: similarity against the score, learning, histograms of the score.

The score is the toxicity where the potential reads the classifier, else log phi. Every function
writes one PNG. The colours are those of Okabe and Ito, which colour-blind readers can tell apart,
and each series also has a marker or line style of its own.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from eval.run import read_lines
from eval.table import named_rows
from tinystories.checkpoint import replacing

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":")
ENDS = {"Base": ("#555555", "X"), "Target": ("black", "*")}
LOOKS = {  # colour and marker of each learner, in every figure
    "paper": ("#0072B2", "o"),
    "weighted": ("#E69F00", "s"),
    "pooled": ("#009E73", "^"),
    "dpo": ("#CC79A7", "D"),
    "grpo": ("#56B4E9", "v"),
}
LABELS = {"toxicity": "Toxicity p(toxic | s)", "log_phi": "log phi"}
LOSSES = {  # phase, title, figure
    "distillation": ("Distillation (eq. 7), nats per token", "loss"),
    "twist learning": ("ESS of CTL's positive weights (eq. 6)", "ess"),
    "fine-tuning": ("Fine-tuning (eq. 9 or 10)", "loss"),
}


def save_figure(figure, path: Path) -> None:
    """Write the PNG whole or not at all and free the figure."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def style(name: str) -> tuple[str, str]:
    """Colour and marker of Base, Target or Generation m."""
    if name in ENDS:
        return ENDS[name]
    m = int(name.split()[-1])
    return COLOURS[m % 6], MARKERS[m % 6]


def similarity_plot(results: dict, key: str, path: Path) -> None:
    """Base, Target and the generations, joined in order (paper, Fig. 1), the score +- 95 %."""
    figure, axes = plt.subplots(figsize=(5, 4))
    rows = {name: row for name, row in named_rows(results).items() if row[key] is not None}
    joined = [(row["similarity"], row[key]) for name, row in rows.items() if name not in ENDS]
    if joined:
        axes.plot(*np.array(joined).T, color="#999999", lw=1, zorder=1)
    for name, row in rows.items():
        colour, marker = style(name)
        look = {"color": colour, "marker": marker, "ms": 8, "capsize": 3, "ls": "none"}
        axes.errorbar(row["similarity"], row[key], row[f"{key}_half_width"], label=name, **look)
    low, high = axes.get_xlim()  # at least so wide that noise does not look like progress
    axes.set(xlim=(min(low, 0.3), max(high, 0.6)), xlabel="Similarity", ylabel=LABELS[key])
    if key == "toxicity":
        axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def learning_curves(records: list[dict], path: Path) -> None:
    """A panel for each kind of learning: a thin line through all steps, and its running mean."""
    panels = [name for name in LOSSES if any(row["phase"] == name for row in records)]
    figure, places = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.5), squeeze=False)
    for axes, phase in zip(places[0], panels, strict=True):
        title, key = LOSSES[phase]
        rows = [row for row in records if row["phase"] == phase]
        for m in sorted({row["generation"] for row in rows}):
            each = [row[key] for row in rows if row["generation"] == m]
            width = max(1, len(each) // 10)
            means = np.convolve(each, np.ones(width) / width, mode="valid")
            updates = np.arange(len(means)) + (width - 1) / 2
            axes.plot(each, color=COLOURS[m % 6], alpha=0.2, lw=0.7)
            line = {"color": COLOURS[m % 6], "ls": DASHES[m % 4], "label": f"Generation {m}"}
            axes.plot(updates, means, **line)
        axes.set(title=title, yscale="log" if key == "ess" else "linear")
        axes.set_xlabel("Update (bold: running mean)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path)


def histogram(scores: dict[str, list[float]], key: str, path: Path) -> None:
    """Shares of texts by score in 20 bins, logarithmic, a line for each source of texts."""
    figure, axes = plt.subplots(figsize=(6, 4))
    if key == "toxicity":
        edges = np.linspace(0.0, 1.0, 21)
    else:
        lowest = min(map(min, scores.values()), default=0.0)
        highest = max(map(max, scores.values()), default=0.0)
        edges = np.linspace(lowest, max(highest, lowest + 1e-6), 21)
    for i, (name, values) in enumerate(scores.items()):
        shares = np.histogram(values, edges)[0] / len(values)
        axes.stairs(shares, edges, color=style(name)[0], label=name, lw=2, ls=DASHES[i % 4])
    axes.set(xlabel=LABELS[key], ylabel="Share of texts", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)


def population_plot(results: dict, path: Path) -> None:
    """The score of populations of K particles, a line for each generation (paper, Fig. 2)."""
    figure, axes = plt.subplots(figsize=(5, 3.5))
    for m, row in enumerate(results["generations"]):
        sizes = [int(size) for size in row["populations"]]
        look = {"color": COLOURS[m % 6], "marker": MARKERS[m % 6], "label": f"Generation {m}"}
        axes.plot(sizes, list(row["populations"].values()), **look)
    axes.set(xscale="log", xlabel="Particles K", ylabel="Score: few particles should suffice")
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def draw_figures(results: dict, run: Path) -> None:
    """The figures of a run, from its results and the files of its generations."""
    folder = run / "figures"
    key = "toxicity" if "toxicity" in results["base"] else "log_phi"
    places = ["base", *(f"generation-{m}" for m in range(len(results["generations"])))]
    records = [row for place in places for row in read_lines(run / place / "metrics.jsonl")]
    learning_curves(records, folder / "learning.png")
    similarity_plot(results, key, folder / f"similarity-{key.replace('_', '-')}.png")
    scores: dict[str, list[float]] = {}
    for row in [row for place in places for row in read_lines(run / place / "samples.jsonl")]:
        if row[key] is not None:  # null stands for what is not finite
            scores.setdefault(row["source"].capitalize(), []).append(row[key])
    histogram(scores, key, folder / f"{key.replace('_', '-')}-histogram.png")
    if all("populations" in row for row in results["generations"]):
        population_plot(results, folder / "particles.png")
