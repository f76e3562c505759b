"""The report of a study: one HTML page with everything in it, and its five figures as PNG.

Nothing is computed here; the tables and their captions are in report.html.
"""

import base64
import dataclasses
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes

from eval.paper.numbers import TARGET, Number, Numbers, Place, collect, write_results
from eval.paper.study import BASELINES, ON_ALL_SEEDS, WITH_PARTICLES, Study
from eval.run.figures import COLOURS, DASHES, MARKERS, save_figure
from tinystories.checkpoint import read_json, write_text
from tinystories.errors import printable


def style(number: int, **more) -> dict:
    """Colour, marker and line of a series."""
    own = {"color": COLOURS[number % 6], "marker": MARKERS[number % 6], "ls": DASHES[number % 4]}
    return own | more


def bars(numbers: list[Number]) -> np.ndarray:
    """Lengths [2, N] of error bars, zero for numbers without an interval."""
    lengths = [(0, 0) if n.low is None else (n.value - n.low, n.high - n.value) for n in numbers]
    return np.array(lengths).T


def draw_line(axes: Axes, x: list[Number], y: list[Number], **options) -> None:
    """Numbers against numbers, with error bars."""
    values = [[number.value for number in side] for side in (x, y)]
    axes.errorbar(*values, xerr=bars(x), yerr=bars(y), capsize=3, **options)


def by_generation(numbers: Numbers, variant: str, quantity: str) -> list[Number]:
    """The means of a quantity, generation by generation."""
    return [row[quantity] for place, row in numbers.table("generations") if place.name == variant]


def toxicity_histograms(axes: Axes, study: Study, numbers: Numbers) -> None:
    """Share of the accepted samples by p(toxic | s) (paper, Fig. 3)."""
    for number, (name, counts) in enumerate(numbers.histograms.items()):
        shares = np.array(counts) / sum(counts)
        edges = np.linspace(0, 1, len(counts) + 1)
        axes.stairs(shares, edges, color=COLOURS[number], ls=DASHES[number], lw=2, label=name)
    axes.set(xlabel="Toxicity p(toxic | s)", ylabel="Share of samples", yscale="log", xlim=(0, 1))


def similarity_toxicity(axes: Axes, study: Study, numbers: Numbers) -> None:
    """Base, Target, generations of three variants, baselines with their sweep (paper, Fig. 1)."""

    def point(row: dict[str, Number], **options) -> None:
        draw_line(axes, [row["similarity"]], [row["toxicity"]], ls="none", **options)

    for number, method in enumerate(BASELINES):
        marks = {"color": COLOURS[number + 2], "marker": MARKERS[number], "fillstyle": "none"}
        for place, row in numbers.table("sweep", "best"):
            if place.name.startswith(method) and "toxicity" in row:
                is_best = place.section == "best"
                more = {"label": method, "ms": 9} if is_best else {"alpha": 0.3}
                point(row, **marks, **more)
    for number, variant in enumerate(ON_ALL_SEEDS):
        x, y = (by_generation(numbers, variant, name) for name in ("similarity", "toxicity"))
        draw_line(axes, x, y, label=variant, **style(number))
        for m, (across, up) in enumerate(zip(x, y, strict=True)):
            axes.annotate(f" {m}", (across.value, up.value))
    point(numbers.rows[Place("rejection", "Base")], color="#555555", marker="X", ms=9, label="Base")
    point(numbers.rows[TARGET], color="black", marker="*", ms=13, label="Target")
    axes.set(xlabel="Similarity", ylabel="Toxicity", xlim=(0, 1.03), ylim=(-0.03, 1.03))


def toxicity_particles(axes: Axes, study: Study, numbers: Numbers) -> None:
    """Toxicity against K, a line for each generation (paper, Fig. 2)."""
    counts = sorted(study.particle_counts)
    for number, variant in enumerate(WITH_PARTICLES):
        for m in range(study.config().generations + 1):
            places = [Place("particles", f"{variant}, K = {count}", m) for count in counts]
            values = [numbers.rows[place]["toxicity"] for place in places]
            options = style(m, ls=DASHES[number], label=f"{variant}, generation {m}")
            draw_line(axes, [Number(count) for count in counts], values, **options)
    axes.axhline(numbers.rows[TARGET]["toxicity"].value, color="black", lw=1, label="Target")
    axes.set(xlabel="Particles K", ylabel="Toxicity", xscale="log", ylim=(-0.03, 1.03))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()


def kl_generations(axes: Axes, study: Study, numbers: Numbers) -> None:
    """KL(sigma||q) by generation."""
    draw_generations(axes, numbers, "kl")
    axes.set(ylabel="KL(σ‖q) in nats", ylim=(0, None))


def evidence_generations(axes: Axes, study: Study, numbers: Numbers) -> None:
    """The mean of log Z-hat by generation, beside log Z_sigma."""
    draw_generations(axes, numbers, "log_z_hat")
    axes.axhline(numbers.rows[TARGET]["log_z"].value, color="black", lw=1, label="log Z of σ")
    axes.set(ylabel="Mean of log Ẑ")


def draw_generations(axes: Axes, numbers: Numbers, quantity: str) -> None:
    """A quantity by generation, a line for each variant with the same target."""
    for number, variant in enumerate((*ON_ALL_SEEDS, "lora")):
        values = by_generation(numbers, variant, quantity)
        generations = [Number(m) for m in range(len(values))]
        draw_line(axes, generations, values, label=variant, **style(number))
    axes.set(xlabel="Generation", xticks=range(len(values)))


FIGURES = (toxicity_histograms, similarity_toxicity, toxicity_particles)
FIGURES += (kl_generations, evidence_generations)


def write_report(study: Study, out: Path, command: str) -> None:
    """The result files, figures and report.html of a study that `command` has finished."""
    numbers = collect(study, out)
    write_results(numbers, out)
    images = {}
    for draw in FIGURES:
        figure, axes = plt.subplots(figsize=(7, 4.6))
        draw(axes, study, numbers)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        path = out / "figures" / f"{draw.__name__.replace('_', '-')}.png"
        save_figure(figure, path)
        images[path.stem] = base64.b64encode(path.read_bytes()).decode()
    run = out / "runs" / f"published-{study.seeds[0]}"
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    environment.filters["printable"] = printable
    page = environment.get_template("report.html").render(
        study=study,
        run=study.config(),
        numbers=numbers,
        images=images,
        command=command,
        versions=read_json(run / "config.json")["versions"],
        settings=json.dumps(dataclasses.asdict(study), indent=1),
    )
    write_text(out / "report.html", page)
