"""The figures of a run, of a study over several seeds (means and 95 % intervals), and the genealogy
of one run of the sampler.

The score is the toxicity where the potential reads the classifier, else log phi. A learner has one
colour and marker everywhere, of Okabe and Ito, which colour-blind readers can tell apart.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from eval.table import named_rows
from tinystories.checkpoint import replacing
from tinystories.tokenizer import token_texts
from tsmc import Trace
from tsmc.estimate import mean_estimate
from tsmc.resampling import normalise

plt.switch_backend("Agg")  # needs no screen
LOOKS = {
    "Base": {"color": "#555555", "marker": "X"},
    "Target": {"color": "black", "marker": "*"},
    "paper": {"color": "#0072B2", "marker": "o"},
    "weighted": {"color": "#E69F00", "marker": "s"},
    "pooled": {"color": "#009E73", "marker": "^"},
    "dpo": {"color": "#CC79A7", "marker": "D"},
    "grpo": {"color": "#56B4E9", "marker": "v"},
    "beta 1": {"color": "#D55E00", "marker": "P"},
}
ALIVE, DYING, SAMPLE = "#0072B2", "#C9C9C9", "#D55E00"  # of the genealogy
LABELS = {"toxicity": "Toxicity", "log_phi": "log phi"}
KL = "kl_target_proposal"
Points = dict[str, list[dict]]  # a point's rows, one of each seed, by its label: a generation
Lines = dict[str, Points]  # by one of LOOKS; a point alone has the label ""


def save_figure(figure, path: Path) -> None:
    """Write the PNG whole or not at all and free the figure."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw_line(axes: plt.Axes, name: str, points: Points, key: str, in_plane: bool = False) -> None:
    """Join the means of a number, of points that have it, over their labels or similarities."""
    points = {
        at: rows
        for at, rows in points.items()
        if rows and all(row.get(key) is not None for row in rows)
    }
    if not points:
        return
    values = [np.array([row[key] for row in rows], dtype=float) for rows in points.values()]
    means = [mean_estimate(torch.from_numpy(each)) for each in values]  # null is NaN, not drawn
    x = list(points)
    y = [mean.value for mean in means]
    if in_plane:
        x = [np.mean([row["similarity"] for row in rows]) for rows in points.values()]
        for label, across, up in zip(points, x, y, strict=True):
            axes.annotate(label, (across, up), xytext=(4, -13), textcoords="offset points")
    half_widths = [mean.half_width() for mean in means]  # of one row infinite, and not drawn
    axes.errorbar(x, y, half_widths, ms=7, capsize=3, label=name, **LOOKS.get(name, {}))
    axes.grid(alpha=0.3)


def draw_generations(lines: Lines, label: str, path: Path, key: str = "toxicity") -> None:
    """Similarity against the score (paper, Fig. 1), and KL(sigma||q) over what the labels are."""
    figure, (plane, kl) = plt.subplots(1, 2, figsize=(7.5, 3.5), layout="constrained")
    for name, points in lines.items():
        draw_line(plane, name, points, key, in_plane=True)
        if "" not in points:
            draw_line(kl, name, points, KL)
    low, high = plane.get_xlim()
    plane.set_xlim(min(low, high - 0.1), max(high, low + 0.1))  # noise must not look like progress
    plane.set(title="Better: nearer to Target", xlabel="Similarity", ylabel=LABELS[key])
    plane.legend()
    kl.set(title="Better: lower", xlabel=label, ylabel="KL(sigma||q), nats")
    if not kl.has_data():
        kl.remove()
    save_figure(figure, path)


def draw_populations(lines: Lines, path: Path, key: str = "toxicity") -> None:
    """The score by particles (paper, Fig. 2) in the first, a middle and the last generation."""
    last = max(map(len, lines.values())) - 1
    shown = sorted({0, last // 2, last})
    figure, panels = plt.subplots(1, len(shown), figsize=(7.5, 3.5), sharey=True, squeeze=False)
    for axes, m in zip(panels[0], shown, strict=True):
        for name, points in lines.items():
            if found := [row["populations"] for row in points.get(str(m), [])]:
                scores = {k: [{key: row[k]} for row in found] for k in sorted(found[0], key=int)}
                draw_line(axes, name, scores, key)
        for rows in lines.get("Target", {}).values():
            axes.axhline(np.mean([row[key] for row in rows]), color="black", lw=1, label="Target")
        axes.set(title=f"Generation {m}", xlabel="Particles K")
    panels[0, 0].set_ylabel(f"{LABELS[key]} (better: nearer to Target)")
    panels[0, -1].legend()
    save_figure(figure, path)


def draw_histogram(lines: Lines, title: str, path: Path) -> None:
    """The shares of texts by toxicity, on a logarithmic axis, of the last point of each line."""
    figure, axes = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    for name, points in lines.items():
        if rows := list(points.values())[-1]:
            colour = {"color": LOOKS[name]["color"]} if name in LOOKS else {}
            shares = np.mean([row["histogram"] for row in rows], axis=0)
            axes.stairs(shares, np.linspace(0, 1, 21), label=name, lw=2, **colour)
    axes.set(title=title, xlabel="Toxicity", ylabel="Share of texts", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def draw_figures(results: dict, run: Path) -> None:
    """The figures of a run."""
    key = "toxicity" if "toxicity" in results["base"] else "log_phi"
    lines = {name: {"": [row]} for name, row in named_rows(results).items() if name in LOOKS}
    lines[results["learner"]] = {str(row["generation"]): [row] for row in results["generations"]}
    folder = run / "figures"
    draw_generations(lines, "Generation", folder / f"similarity-{key.replace('_', '-')}.png", key)
    if key == "toxicity":
        draw_histogram(lines, "Better: like Target", folder / "toxicity-histogram.png")
    if "populations" in results["generations"][-1]:
        draw_populations(lines, folder / "particles.png", key)


def draw_genealogy(trace: Trace, log_phi: Tensor, tokenizer: Tokenizer, path: Path) -> None:
    """The genealogy of the first run of a trace; log_phi [K] is that of its texts.

    Each dot is a particle after step t, the larger the larger its weight; lines lead to the
    particles that continue it, and at the end to the final samples. Blue particles have descendants
    among these, grey ones do not. The orange line follows the ancestors of the sample with the
    largest phi, whose tokens are written above. Bars compare phi of the whole texts.
    """
    ancestors = trace.ancestors[:, 0].tolist()  # [T][K]
    tokens = trace.tokens[:, 0].tolist()  # [T][K]
    weights = normalise(trace.log_weights[:, 0].cpu().double())  # [T, K]
    length, particles = weights.shape
    phi = (log_phi - log_phi.max()).cpu().double().exp()  # [K] over the largest
    lineages = [*trace.lineages()[:, 0].tolist(), list(range(particles))]  # [T + 1][K]
    best = phi[lineages[-2]].argmax().item()
    chosen = [tokens[t][line[best]] for t, line in enumerate(lineages[:-1])]  # [T]
    written = token_texts(tokenizer, chosen)
    figure, (axes, bars) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, width_ratios=[10, 1])
    for t, line in enumerate(lineages):
        colours = [ALIVE if k in line else DYING for k in range(particles)]
        for k, parent in enumerate(ancestors[t - 1] if t > 0 else []):
            axes.plot([t, t + 1], [parent, k], color=colours[k], lw=0.8, zorder=int(k in line))
        sizes = 4 + 90 * weights[t].numpy() if t < length else 8
        axes.scatter([t + 1] * particles, range(particles), s=sizes, c=colours, zorder=3)
    for t in range(length):
        look = {"fontsize": 9, "rotation": 45, "color": SAMPLE, "parse_math": False}
        axes.text(t + 1, particles, written[t].strip(), **look)
    steps = range(1, length + 2)
    axes.plot(steps, [line[best] for line in lineages], color=SAMPLE, lw=1.6, zorder=2)
    axes.set(xlabel="step t, then the samples", ylabel="particle")
    axes.set_xticks(steps[:-1] if length <= 25 else steps[4:-1:5])
    axes.set(xlim=(0.5, length + 1.5), ylim=(-1, particles))
    colours = [ALIVE if k in lineages[-2] else DYING for k in range(particles)]
    bars.barh(range(particles), phi.numpy(), color=colours)
    bars.set(xlabel="phi / largest", xlim=(0, 1.05))
    for one in (axes, bars):
        one.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
