"""The figures of the report, each as PNG and SVG: toxicity histograms, similarity against toxicity, toxicity against K.

They show numbers of `eval.numbers` and compute none. Colours are those of Okabe and Ito, and each series has its own marker
or line style. Text is in grey tones and the ground is white, so that a figure stands on a light card in the dark.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from eval.paper.numbers import NAMES, Number, Numbers, setting_names
from eval.paper.study import METHODS, StudyConfig
from eval.paper.task import BINS
from eval.run.figures import COLOURS, MARKERS
from tinystories.checkpoint import replacing

SHOWN = ("rejection", "generations", "sweep", "best")  # sections whose points lie on the plane
BASE, TARGET = "#555555", "#000000"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "figures",  # names in the file then depend on nothing but the figure
}
METHOD_STYLE = dict(
    zip(METHODS, ((COLOURS[5], "s"), (COLOURS[1], "D"), (COLOURS[3], "^"), (COLOURS[4], "v")), strict=True)
)


def save(figure, folder: Path, name: str) -> None:
    """Write NAME.png and NAME.svg and free the figure."""
    for form, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
        with replacing(folder / f"{name}.{form}") as temporary:
            figure.savefig(temporary, format=form, bbox_inches="tight", **options)
    plt.close(figure)


def errors(row: Number) -> np.ndarray:
    """Lengths [2, 1] of the error bars of a number."""
    low, high = (row.value if limit is None else limit for limit in (row.low, row.high))
    return np.array([[max(0.0, row.value - low)], [max(0.0, high - row.value)]])


def toxicity_histograms(study: StudyConfig, numbers: Numbers, folder: Path) -> None:
    """Share of accepted samples by p(toxic | s), for every beta."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    edges = np.linspace(0, 1, BINS + 1)
    for i, name in enumerate(numbers.names("histogram")):
        counts = [row.value for key, row in numbers.rows.items() if key[:2] == ("histogram", name)]
        label = name.replace("beta", "β =") + {0: " (Base)", study.run.beta: " (Target)"}.get(
            float(name.split()[1]), ""
        )
        style = {"color": (BASE, COLOURS[0], COLOURS[5])[i % 3], "ls": ("-", "--", "-")[i % 3], "lw": 2}
        axes.stairs(np.array(counts) / sum(counts), edges, label=label, fill=False, **style)
    axes.set(xlabel="Toxicity  p(toxic | s)", ylabel="Share of samples (log)", yscale="log", xlim=(0, 1))
    axes.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.14))
    save(figure, folder, "toxicity-histograms")


def similarity_toxicity(study: StudyConfig, numbers: Numbers, folder: Path) -> None:
    """Base, Target, baselines and the generations of TSMC."""
    figure, axes = plt.subplots(figsize=(6.8, 4.6))

    def both(section: str, name: str, seed: int | str, m: int | str = "") -> list[Number]:
        return [numbers.get(section, name, seed, m, quantity) for quantity in ("similarity", "toxicity")]

    def mark(rows: list[Number], colour: str, marker: str, label: str, size: float, order: int) -> None:
        x, y = rows
        style = {"color": colour, "marker": marker, "ms": size, "label": label, "capsize": 2.5, "elinewidth": 1.2}
        axes.errorbar(x.value, y.value, xerr=errors(x), yerr=errors(y), ls="none", zorder=order, **style)

    for method in study.methods:
        colour, marker = METHOD_STYLE[method]
        for name in setting_names(numbers, "sweep", method):
            rows = both("sweep", name, study.seeds[0])
            if all(rows):
                axes.plot(rows[0].value, rows[1].value, marker, color=colour, alpha=0.3, ms=5, mew=0, zorder=2)
        for name in setting_names(numbers, "best", method):
            rows = both("best", name, "mean")
            if all(rows):
                mark(rows, colour, marker, f"{NAMES[method]} (best)", 7, 4)
    tsmc = NAMES["tsmc"]
    generations = range(study.run.generations + 1)
    for seed in study.seeds:
        points = [both("generations", tsmc, seed, m) for m in generations]
        axes.plot(
            [x.value for x, _ in points], [y.value for _, y in points], color=COLOURS[0], alpha=0.25, lw=1, zorder=1
        )
    means = [both("generations", tsmc, "mean", m) for m in generations]
    axes.plot([x.value for x, _ in means], [y.value for _, y in means], color=COLOURS[0], lw=1.8, zorder=5)
    for m, rows in zip(generations, means, strict=True):
        mark(rows, COLOURS[0], "o", "TSMC, generations joined" if m == 0 else "", 9, 6)
        axes.annotate(
            str(m), [row.value for row in rows], color="white", fontsize=7, ha="center", va="center", zorder=7
        )
    for name, beta, colour, marker in (("Base", 0.0, BASE, "X"), ("Target", study.run.beta, TARGET, "*")):
        rows = both("rejection", f"beta {beta:g}", "")
        if all(rows):
            mark(rows, colour, marker, name, 13 if name == "Target" else 9, 8)
    points = [row.value for key, row in numbers.rows.items() if row.quantity == "similarity" and key[0] in SHOWN]
    axes.set_xlim(min(points) - 0.08, min(1.03, max(points) + 0.08))  # points inside, bars cut at the frame
    handles, labels = axes.get_legend_handles_labels()
    marks = [handle[0] for handle in handles]  # without error bars, which hide the marker
    axes.set(xlabel="Similarity (mean pairwise cosine)", ylabel="Toxicity  p(toxic | s)", ylim=(-0.04, 1.04))
    axes.legend(marks, labels, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, columnspacing=1.2)
    save(figure, folder, "similarity-toxicity")


def toxicity_by_particles(study: StudyConfig, numbers: Numbers, folder: Path) -> None:
    """Toxicity against K, one line a generation."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    counts = sorted(study.particle_counts)
    for m in range(study.run.generations + 1):
        rows = [numbers.get("particles", f"K = {count}", "mean", m, "toxicity") for count in counts]
        bars = np.concatenate([errors(row) for row in rows], 1)
        style = {"color": COLOURS[m % 6], "marker": MARKERS[m % 6], "ls": ("-", "--", "-.")[m % 3], "capsize": 3}
        places = [count * 1.03 ** (m - 1) for count in counts]  # beside each other, so that no bar hides another
        axes.errorbar(places, [row.value for row in rows], yerr=bars, label=f"Generation {m}", **style)
    target = numbers.get("rejection", f"beta {study.run.beta:g}", "", "", "toxicity")
    axes.axhline(target.value, color=TARGET, ls=(0, (5, 3)), lw=1.3, label="Target")
    axes.set(xlabel="Number of particles K", ylabel="Toxicity  p(toxic | s)", xscale="log", ylim=(-0.04, 1.04))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
    save(figure, folder, "toxicity-particles")


def draw(study: StudyConfig, numbers: Numbers, out: Path) -> None:
    """All figures of a study, into OUT/figures."""
    with plt.rc_context(STYLE):
        for figure in (toxicity_histograms, similarity_toxicity, toxicity_by_particles):
            figure(study, numbers, out / "figures")
