"""The figure of a job: the score, and KL(sigma||q) where it is known, by generation."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no screen
from matplotlib.figure import Figure

from eval.metrics import COLUMNS, KL

LEVELS = {"base": ("#555555", ":"), "target": ("black", "--")}  # horizontal lines


def draw_figure(results: dict[str, Any], path: Path) -> None:
    """Write it as PNG."""
    rows = results["generations"]
    score = "toxicity" if "toxicity" in rows[0] else "log_phi"
    keys = [key for key in (score, KL) if key in rows[0]]
    figure = Figure(figsize=(7.5, 3.7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        for name, (color, style) in LEVELS.items():
            if key in results.get(name, {}):
                axes.axhline(results[name][key], label=name, color=color, linestyle=style)
        half_widths = [row.get(f"{key}_half_width", 0.0) for row in rows]
        values = [row[key] for row in rows]
        look = {"marker": "o", "capsize": 3, "color": "#0072B2", "label": results["learner"]}
        axes.errorbar(range(len(rows)), values, half_widths, **look)
        axes.set(xlabel="generation", ylabel=COLUMNS[key][0], xticks=range(len(rows)))
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
