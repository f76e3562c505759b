"""The genealogy of one run as a picture: `python -m tsmc RUN --particles 24 --picture FILE.png`.

Each dot is a particle after step t, the larger the larger its weight; lines lead to the particles
that continue it. Blue particles have descendants among the final samples, grey ones do not. The
orange line follows the ancestors of one final sample, whose tokens are written above.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from tokenizers import Tokenizer

from eval.run.figures import save_figure
from tsmc import Trace
from tsmc.resampling import normalise

ALIVE = "#0072B2"
DYING = "#C9C9C9"
SAMPLE = "#D55E00"


def draw_genealogy(trace: Trace, tokenizer: Tokenizer, path: Path) -> None:
    """Write the picture of the first run of a trace as PNG."""
    ancestors = trace.ancestors[:, 0].tolist()  # [T][K]
    tokens = trace.tokens[:, 0].tolist()  # [T][K]
    weights = normalise(trace.log_weights[:, 0].cpu().double())  # [T, K]
    lineages = trace.lineages()[:, 0].tolist()  # [T][K]
    length, particles = weights.shape
    figure, axes = plt.subplots(figsize=(10, 4.2))
    for t, line in enumerate(lineages):
        colours = [ALIVE if k in line else DYING for k in range(particles)]
        for k, parent in enumerate(ancestors[t - 1] if t > 0 else []):
            axes.plot([t, t + 1], [parent, k], color=colours[k], lw=0.8, zorder=int(k in line))
        sizes = 4 + 90 * weights[t].numpy()
        axes.scatter([t + 1] * particles, range(particles), s=sizes, c=colours, zorder=3)
        token = tokenizer.decode([tokens[t][line[0]]], skip_special_tokens=False).strip()
        axes.text(t + 1, particles, token, fontsize=9, rotation=45, color=SAMPLE)
    steps = range(1, length + 1)
    axes.plot(steps, [line[0] for line in lineages], color=SAMPLE, lw=1.6, zorder=2)
    axes.set(xlabel="step t", ylabel="particle", xticks=steps)
    axes.set(xlim=(0.5, length + 0.5), ylim=(-1, particles))
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
