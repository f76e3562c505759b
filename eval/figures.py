"""The figures of a run, of a study over several seeds, and the genealogy of a run of the sampler.

A point is a mean over seeds with its 95 % interval. The score is the toxicity where the potential
reads the classifier, else log phi. The colours, of Okabe and Ito, can be told apart by all readers.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator
from tokenizers import Tokenizer
from torch import Tensor

from tinystories.files import replacing
from tinystories.load import token_texts
from tsmc.draws import normalise
from tsmc.estimate import mean_estimate
from tsmc.sampler import Step, lineages

plt.switch_backend("Agg")  # needs no screen
LOOKS = {
    "Base": {"color": "#555555", "linestyle": ":"},
    "Target": {"color": "black", "linestyle": "--"},
    "paper": {"color": "#0072B2", "marker": "o"},
    "pooled": {"color": "#009E73", "marker": "^"},
    "end-alone": {"color": "#E69F00", "marker": "s"},
    "dpo": {"color": "#CC79A7", "marker": "D"},
    "grpo": {"color": "#56B4E9", "marker": "v"},
    "rl": {"color": "#D55E00", "marker": "P"},
}
OTHERS = [LOOKS[name] for name in ("paper", "grpo", "pooled", "dpo", "end-alone")]  # in order
LEVELS = ("Base", "Target")  # horizontal lines
ALIVE, DYING, SAMPLE = "#0072B2", "#C9C9C9", "#D55E00"  # of the genealogy
KL = "kl_target_proposal"
LABELS = {
    "toxicity": "Toxicity (better: nearer to Target)",
    KL: "KL(sigma||q), nats (better: lower)",
}
LABELS["log_phi"] = "log phi (better: nearer to Target)"
Lines = dict[str, dict[str, list[dict]]]
"""By one of LOOKS, then by the label of a point, as "0" for generation 0: its row of each seed."""


def save_figure(figure, path: Path) -> None:
    """Write the PNG whole or not at all and free the figure."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
    plt.close(figure)


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
            axes.axhline(y[0], label=name, lw=1.2, **LOOKS[name])
            continue
        # Side by side, so that no interval hides another. Of one row it is infinite: not drawn.
        place = names.index(name)
        x = [labels.index(label) + 0.05 * (place - (len(names) - 1) / 2) for label in means]
        half_widths = [mean.half_width() for mean in means.values()]
        look = LOOKS.get(name) or OTHERS[place % len(OTHERS)]
        axes.errorbar(x, y, half_widths, ms=6, capsize=3, label=name, **look)
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(alpha=0.3)


def draw_panels(panels: dict[str, tuple[str, Lines]], path: Path) -> None:
    """Numbers by generation: the key of a number, and its lines, by the title of a panel."""
    shape = {"figsize": (7.5, 3.7), "squeeze": False, "layout": "constrained"}
    figure, grid = plt.subplots(1, len(panels), **shape)
    for axes, (title, (key, lines)) in zip(grid[0], panels.items(), strict=True):
        draw_lines(axes, lines, key)
        axes.set(title=title, xlabel="Generation", ylabel=LABELS[key])
        means = [y for line in axes.containers for y in line[0].get_ydata()]
        if key == KL and max(means) > 4 * min(means) > 0:
            # Baselines are far away, and intervals may reach anywhere: the means choose the axis.
            axes.set(yscale="log", ylim=(0.8 * min(means), 1.3 * max(means)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, path)


def draw_figures(results: dict, run: Path) -> None:
    """The figure of a run: the score, and KL(sigma||q) where it is known."""
    key = "toxicity" if "toxicity" in results["base"] else "log_phi"
    lines: Lines = {}
    for name in LEVELS:
        if row := results.get(name.lower()):
            lines[name] = {"": [row]}
    lines[results["learner"]] = {str(m): [row] for m, row in enumerate(results["generations"])}
    panels = {"Score of the samples": (key, lines)}
    if KL in results["generations"][0]:
        panels["Proposal"] = KL, lines
    draw_panels(panels, run / "figures" / "generations.png")


def draw_genealogy(trace: list[Step], log_phi: Tensor, tokenizer: Tokenizer, path: Path) -> None:
    """The genealogy of the first run of a trace; log_phi [K] is that of its texts.

    Each dot is a particle after step t, the larger the larger its weight; lines lead to the
    particles that continue it, and at the end to the final samples. Blue particles have descendants
    among these, grey ones do not. The orange line follows the ancestors of the sample with the
    largest phi, whose tokens are written above. Bars compare phi of the whole texts.
    """
    ancestors = [step.ancestors[0].tolist() for step in trace]  # [T][K]
    weights = [normalise(step.log_weights[0].cpu().double()) for step in trace]  # [T][K]
    length, particles = len(trace), len(log_phi)
    phi = (log_phi - log_phi.max()).exp()  # [K] over the largest
    lines = [*lineages(trace)[:, 0].tolist(), list(range(particles))]  # [T + 1][K]
    best = phi[lines[-2]].argmax().item()
    chosen = [trace[t].tokens[0, lines[t][best]].item() for t in range(length)]  # [T]
    figure, (axes, bars) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, width_ratios=[10, 1])
    for t, line in enumerate(lines):
        colours = [ALIVE if k in line else DYING for k in range(particles)]
        for k, parent in enumerate(ancestors[t - 1] if t > 0 else []):
            axes.plot([t, t + 1], [parent, k], color=colours[k], lw=0.8, zorder=int(k in line))
        sizes = 4 + 90 * weights[t].numpy() if t < length else 8
        axes.scatter([t + 1] * particles, range(particles), s=sizes, c=colours, zorder=3)
    look = {"fontsize": 9, "rotation": 45, "color": SAMPLE, "parse_math": False}
    for t, word in enumerate(token_texts(tokenizer, chosen)):
        axes.text(t + 1, particles, word.strip(), **look)
    steps = range(1, length + 2)
    axes.plot(steps, [line[best] for line in lines], color=SAMPLE, lw=1.6, zorder=2)
    axes.set(xlabel="step t, then the samples", ylabel="particle")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xticks(steps[:-1] if length <= 25 else steps[4:-1:5])
    axes.set(xlim=(0.5, length + 1.5), ylim=(-1, particles))
    colours = [ALIVE if k in lines[-2] else DYING for k in range(particles)]
    bars.barh(range(particles), phi.numpy(), color=colours)
    bars.set(xlabel="phi / largest", xlim=(0, 1.05))
    for one in (axes, bars):
        one.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
