"""The figures of the report, each as PNG and SVG: toxicity histograms, similarity against toxicity, toxicity against K.

They show numbers of `numbers.py` and compute none. Colours are those of Okabe and Ito, and each series has its own marker or
line style. Text is in grey tones and the ground is white, so that a figure stands on a light card in the dark.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from eval.paper.numbers import Number, Numbers
from eval.paper.study import METHODS, NAMES, TSMC, Place, StudyConfig
from eval.run.figures import COLOURS, MARKERS
from tinystories.checkpoint import replacing

SHOWN = ("rejection", "generations", "sweep", "best")  # sections whose points lie on the plane
BASE, TARGET = "#555555", "#000000"
STYLE = {"font.size": 10, "axes.edgecolor": "#666666", "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"svg.hashsalt": "figures"}  # names in the file then depend on nothing but the figure
METHOD_STYLE = dict(zip(METHODS, zip((COLOURS[i] for i in (5, 1, 3, 4)), "sD^v", strict=True), strict=True))


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
    names = {0: " (Base)", study.run.beta: " (Target)"}
    for i, name in enumerate(numbers.names("histogram")):
        counts = [row.value for key, row in numbers.rows.items() if key[:2] == ("histogram", name)]
        label = name.replace("beta", "β =") + names.get(float(name.split()[1]), "")
        style = {"color": (BASE, COLOURS[0], COLOURS[5])[i % 3], "ls": ("-", "--", "-")[i % 3], "lw": 2}
        edges = np.linspace(0, 1, len(counts) + 1)
        axes.stairs(np.array(counts) / sum(counts), edges, label=label, fill=False, **style)
    axes.set(xlabel="Toxicity  p(toxic | s)", ylabel="Share of samples (log)", yscale="log", xlim=(0, 1))
    axes.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.14))
    save(figure, folder, "toxicity-histograms")


def marks(study: StudyConfig, numbers: Numbers) -> list[tuple[Place, str, str, str, float]]:
    """Place, colour, marker, label and size of the points with error bars, the last in front."""
    points = []
    for method in study.methods:
        for name in numbers.names("best", method):
            points.append((("best", name, "mean", ""), *METHOD_STYLE[method], f"{NAMES[method]} (best)", 7))
    for m in range(study.run.generations + 1):
        label = "TSMC, generations joined" if m == 0 else ""
        points.append((("generations", TSMC, "mean", m), COLOURS[0], "o", label, 9))
    points.append((("rejection", "beta 0", "", ""), BASE, "X", "Base", 9))
    return [*points, (study.target_place(), TARGET, "*", "Target", 13)]


def similarity_toxicity(study: StudyConfig, numbers: Numbers, folder: Path) -> None:
    """Base, Target, baselines and the generations of TSMC."""
    figure, axes = plt.subplots(figsize=(6.8, 4.6))

    def point(place: Place) -> list[float] | None:
        ends = [numbers.values([place], quantity) for quantity in ("similarity", "toxicity")]
        return None if None in ends else [values[0] for values in ends]

    for seed, style in [(seed, {"alpha": 0.25, "lw": 1}) for seed in study.seeds] + [("mean", {"lw": 1.8})]:
        line = [point(("generations", TSMC, seed, m)) for m in range(study.run.generations + 1)]
        axes.plot(*zip(*line, strict=True), color=COLOURS[0], zorder=1, **style)
    for method in study.methods:
        colour, marker = METHOD_STYLE[method]
        sweep = [point(("sweep", name, study.seeds[0], "")) for name in numbers.names("sweep", method)]
        for x, y in filter(None, sweep):
            axes.plot(x, y, marker, color=colour, alpha=0.3, ms=5, mew=0, zorder=2)
    for order, (place, colour, marker, label, size) in enumerate(marks(study, numbers), 3):
        if (middle := point(place)) is not None:
            x, y = (errors(numbers.get(place, quantity)) for quantity in ("similarity", "toxicity"))
            style = {"color": colour, "marker": marker, "ms": size, "label": label, "capsize": 2.5, "elinewidth": 1.2}
            axes.errorbar(*middle, y, x, ls="none", zorder=order, **style)
            number = {"color": "white", "fontsize": 7, "ha": "center", "va": "center", "zorder": order + 0.5}
            axes.annotate(str(place[3]), middle, **number)
    points = [row.value for key, row in numbers.rows.items() if row.quantity == "similarity" and key[0] in SHOWN]
    axes.set_xlim(min(points) - 0.08, min(1.03, max(points) + 0.08))  # points inside, bars cut at the frame
    handles, labels = axes.get_legend_handles_labels()
    axes.set(xlabel="Similarity (mean pairwise cosine)", ylabel="Toxicity  p(toxic | s)", ylim=(-0.04, 1.04))
    without_bars = [handle[0] for handle in handles]  # bars hide the marker
    axes.legend(without_bars, labels, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, columnspacing=1.2)
    save(figure, folder, "similarity-toxicity")


def toxicity_by_particles(study: StudyConfig, numbers: Numbers, folder: Path) -> None:
    """Toxicity against K, one line a generation."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    counts = sorted(study.particle_counts)
    for m in range(study.run.generations + 1):
        rows = [numbers.get(("particles", f"K = {count}", "mean", m), "toxicity") for count in counts]
        bars = np.concatenate([errors(row) for row in rows], 1)
        style = {"color": COLOURS[m % 6], "marker": MARKERS[m % 6], "ls": ("-", "--", "-.")[m % 3], "capsize": 3}
        places = [count * 1.03 ** (m - 1) for count in counts]  # beside each other, so that no bar hides another
        axes.errorbar(places, [row.value for row in rows], yerr=bars, label=f"Generation {m}", **style)
    target = numbers.get(study.target_place(), "toxicity")
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
