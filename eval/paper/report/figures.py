"""The figures of the report, each for light and dark: NAME.svg, NAME-dark.svg, and NAME.png in light.

    toxicity-histograms   accepted samples by toxicity, for every beta
    similarity-toxicity   the plane on which the paper compares methods
    toxicity-kl           toxicity against KL(sigma||q): a toxic text that p^(0) would never write is worth nothing
    kl-generations        KL(sigma||q) by generation
    evidence-generations  how far log Z-hat stays below log Z of sigma, by generation
    toxicity-particles    toxicity against K

They show numbers of `numbers.py` and compute none. Colours are those of Okabe and Ito, and each series has its own marker or
line style. The ground is transparent.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from eval.paper.numbers import Number, Numbers
from eval.paper.study import METHODS, NAMES, Place, StudyConfig
from eval.run.figures import COLOURS, MARKERS
from tinystories.checkpoint import replacing

BASE = "#808080"
ON_PLANE = ("rejection", "generations", "best")  # sections whose means lie inside the plane
COLLAPSED = 0.9  # similarity of texts that are nearly all the same
STYLE = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False, "axes.facecolor": "none"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "none", "savefig.facecolor": "none"}
STYLE |= {"svg.hashsalt": "figures"}  # names in the file then depend on nothing but the figure
INK = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
THEMES = {"": dict.fromkeys(INK, "#1d2126") | {"axes.edgecolor": "#666666"}}
THEMES["-dark"] = dict.fromkeys(INK, "#e6e8ea") | {"axes.edgecolor": "#999999"}
METHOD_STYLE = dict(zip(METHODS, zip((COLOURS[i] for i in (5, 1, 3, 4)), "sD^v", strict=True), strict=True))


class Series(NamedTuple):
    """How the generations of a variant are drawn."""

    variant: str
    label: str
    colour: str
    marker: str
    line: str


SERIES = (
    Series("tsmc", "TSMC as published", COLOURS[0], "o", "-"),
    Series("late", NAMES["late"], "#8F6FD0", "h", "--"),
    Series("pooled", NAMES["pooled"], COLOURS[2], "p", "-."),
)


def ink() -> str:
    """The colour of text, for Target."""
    return plt.rcParams["text.color"]


def save(figure, folder: Path, name: str, theme: str) -> None:
    """Write the figure for one theme and free it; PNG, on white, for light alone."""
    forms = [(f"{name}{theme}.svg", {"metadata": {"Date": None}})]
    forms += [] if theme else [(f"{name}.png", {"dpi": 150, "facecolor": "white"})]
    for file, options in forms:
        with replacing(folder / file) as temporary:
            figure.savefig(temporary, format=file[-3:], bbox_inches="tight", **options)
    plt.close(figure)


def errors(row: Number) -> np.ndarray:
    """Lengths [2, 1] of the error bars of a number."""
    low, high = (row.value if limit is None else limit for limit in (row.low, row.high))
    return np.array([[max(0.0, row.value - low)], [max(0.0, high - row.value)]])


def legend_below(axes, columns: int, space: float = 0.14) -> None:
    """The legend under the axis, where it covers nothing; markers without their error bars, which would hide them."""
    handles, labels = axes.get_legend_handles_labels()
    markers = [handle[0] if isinstance(handle, tuple) else handle for handle in handles]
    axes.legend(markers, labels, loc="upper center", bbox_to_anchor=(0.5, -space), ncols=columns, columnspacing=1.2)


def toxicity_histograms(study: StudyConfig, numbers: Numbers):
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
    legend_below(axes, 3, 0.17)
    return figure


def marks(study: StudyConfig, numbers: Numbers) -> Iterator[tuple[Place, dict]]:
    """Places of the points with error bars and how they are drawn, the last in front."""
    for method in study.methods:
        colour, marker = METHOD_STYLE[method]
        for name in numbers.names("best", method):
            yield ("best", name, "mean", ""), {"color": colour, "marker": marker, "label": NAMES[method], "ms": 7}
    for series in SERIES:
        for m in range(study.run.generations + 1):
            style = {"color": series.colour, "marker": series.marker, "label": series.label if m == 0 else "", "ms": 10}
            yield ("generations", NAMES[series.variant], "mean", m), style
    yield ("rejection", "beta 0", "", ""), {"color": BASE, "marker": "X", "label": "Base", "ms": 9}


def scatter(study: StudyConfig, numbers: Numbers, axes, across: str, edge: float) -> None:
    """Points with `across` on the x axis and toxicity on the y axis; what lies beyond `edge` is an arrow there."""

    def point(place: Place) -> list[Number] | None:
        """The numbers of both axes, where both are known and finite."""
        of_base = across == "kl" and place[0] == "rejection"  # which stands beside Target's numbers
        x = numbers.get(study.target_place(), "kl_base") if of_base else numbers.get(place, across)
        pair = [x, numbers.get(place, "toxicity")]
        return pair if all(number is not None and number.value is not None for number in pair) else None

    for series in SERIES:
        points = [point(("generations", NAMES[series.variant], "mean", m)) for m in range(study.run.generations + 1)]
        line = [(x.value, y.value) for x, y in filter(None, points)]
        axes.plot(*zip(*line, strict=True), color=series.colour, ls=series.line, lw=1.6, zorder=1)
    for method in study.methods:
        style = {"color": METHOD_STYLE[method][0], "alpha": 0.35, "ms": 5, "mew": 0, "zorder": 2, "clip_on": False}
        points = [point(("sweep", name, study.seeds[0], "")) for name in numbers.names("sweep", method)]
        for x, y in filter(None, points):
            axes.plot(min(x.value, edge), y.value, ">" if x.value > edge else METHOD_STYLE[method][1], **style)
    for order, (place, style) in enumerate(marks(study, numbers), 3):
        if (pair := point(place)) is not None:
            x, y = pair
            marker = {"marker": ">", "clip_on": False} if x.value > edge else {"xerr": errors(x)}
            bars = {"yerr": errors(y), "ls": "none", "capsize": 2.5, "elinewidth": 1.2, "zorder": order}
            axes.errorbar(min(x.value, edge), y.value, **bars, **(style | marker))
            number = {"color": "white", "fontsize": 7, "weight": "bold", "ha": "center", "va": "center"}
            axes.annotate(str(place[3]), (x.value, y.value), zorder=order + 0.5, **number)
    axes.set(ylabel="Toxicity  p(toxic | s)", ylim=(-0.04, 1.04))


def similarity_toxicity(study: StudyConfig, numbers: Numbers):
    """Base, Target, baselines and the generations; runs of the sweep that have collapsed are arrows at the right."""
    figure, axes = plt.subplots(figsize=(6.8, 4.6))
    rows = [row for row in numbers.rows.values() if row.quantity == "similarity" and row.section in ON_PLANE]
    means = [row.value for row in rows if row.seed in ("", "mean") and row.value is not None]
    edge = max(value for value in means if value < COLLAPSED) + 0.06
    scatter(study, numbers, axes, "similarity", edge)
    target = [numbers.get(study.target_place(), name) for name in ("similarity", "toxicity")]
    bars = {"yerr": errors(target[1]), "xerr": errors(target[0]), "ls": "none", "zorder": 99}
    axes.errorbar(*(row.value for row in target), color=ink(), marker="*", ms=13, label="Target", **bars)
    axes.set(xlabel="Similarity (mean pairwise cosine)", xlim=(min(means) - 0.06, edge))
    legend_below(axes, 3)
    return figure


def toxicity_kl(study: StudyConfig, numbers: Numbers):
    """Toxicity of every method's texts against the KL of sigma from it; Target's is zero, left of any logarithmic axis."""
    figure, axes = plt.subplots(figsize=(6.8, 4.6))
    scatter(study, numbers, axes, "kl", math.inf)
    target = numbers.get(study.target_place(), "toxicity")
    axes.axhline(target.value, color=ink(), ls=(0, (5, 3)), lw=1.3, label="Target (KL = 0)")
    axes.set(xlabel="KL(σ‖q) in nats, for models without a twist KL(σ‖π)  (log)", xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    legend_below(axes, 3)
    return figure


def by_generation(study: StudyConfig, numbers: Numbers, axes, quantity: str, shift: float = 0.0, sign: int = 1) -> None:
    """Lines of shift + sign * quantity against the generation, for every variant that has the same target."""
    lora = Series("lora", NAMES["lora"], COLOURS[5], "s", ":")
    for i, series in enumerate((*SERIES, lora)):
        rows = [
            numbers.get(("generations", NAMES[series.variant], "mean", m), quantity)
            for m in range(study.run.generations + 1)
        ]
        bars = np.concatenate([errors(row)[::sign] for row in rows], 1)  # of -x the lower bar is that above x
        values = [shift + sign * row.value for row in rows]
        style = {
            "color": series.colour,
            "marker": series.marker,
            "ls": series.line,
            "label": series.label,
            "capsize": 3,
        }
        axes.errorbar([m + 0.04 * (i - 1.5) for m in range(len(rows))], values, yerr=bars, **style)
    axes.set(xlabel="Generation", xticks=range(study.run.generations + 1))
    legend_below(axes, 2, 0.16)


def kl_generations(study: StudyConfig, numbers: Numbers):
    """KL(sigma||q) by generation."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    by_generation(study, numbers, axes, "kl")
    axes.set(ylabel="KL(σ‖q) in nats", ylim=(0, None))
    return figure


def evidence_generations(study: StudyConfig, numbers: Numbers):
    """log Z of sigma minus the mean of log Z-hat, by generation."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    log_z = numbers.get(study.target_place(), "log_z").value
    by_generation(study, numbers, axes, "log_z_hat_mean", log_z, -1)
    axes.set(ylabel="log Z of σ − mean log Ẑ, nats (log)", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    return figure


def toxicity_particles(study: StudyConfig, numbers: Numbers):
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
    axes.axhline(target.value, color=ink(), ls=(0, (5, 3)), lw=1.3, label="Target")
    axes.set(xlabel="Number of particles K", ylabel="Toxicity  p(toxic | s)", xscale="log", ylim=(-0.04, 1.04))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    legend_below(axes, 4, 0.16)
    return figure


FIGURES = (
    toxicity_histograms,
    similarity_toxicity,
    toxicity_kl,
    kl_generations,
    evidence_generations,
    toxicity_particles,
)


def draw(study: StudyConfig, numbers: Numbers, out: Path) -> None:
    """All figures of a study, into OUT/figures."""
    for theme, colours in THEMES.items():
        with plt.rc_context(STYLE | colours):
            for figure in FIGURES:
                save(figure(study, numbers), out / "figures", figure.__name__.replace("_", "-"), theme)
