"""The genealogy of one run as a picture: `python -m tsmc RUN --particles 24 --picture FILE.png`.

Each dot is a particle after step t, the larger the larger its weight; lines lead to the particles that continue it. What is
blue lives on in the final samples, what is grey dies out. The orange line leads to one final sample, whose tokens stand above.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection
from tokenizers import Tokenizer

from eval.run.figures import save_figure
from eval.viewer.draws import Draws
from tsmc.weights import normalise

ALIVE, DYING, SAMPLE = "#0072B2", "#C9C9C9", "#D55E00"


def draw_genealogy(draws: Draws, tokenizer: Tokenizer, path: Path) -> None:
    """Write the picture of one population as PNG."""
    trace = draws.trace
    ancestors, tokens = trace.ancestors[:, 0].tolist(), trace.tokens[:, 0].tolist()  # [T][K]
    weights = normalise(trace.log_weights[:, 0].double())  # [T, K]
    lineages = [set(step) for step in trace.lineages()[:, 0].tolist()]  # [T] who has descendants among the samples
    length, particles = weights.shape
    figure, axes = plt.subplots(figsize=(10, 4.2))
    lines, colours = [], []
    for t in range(length - 1):
        for child, parent in enumerate(ancestors[t]):
            lines.append([(t + 1, parent), (t + 2, child)])
            colours.append(ALIVE if child in lineages[t + 1] else DYING)
    order = sorted(range(len(lines)), key=lambda line: colours[line] == ALIVE)  # what lives on is drawn last
    axes.add_collection(LineCollection([lines[i] for i in order], colors=[colours[i] for i in order], linewidths=0.8))
    for t in range(length):
        colour = [ALIVE if k in lineages[t] else DYING for k in range(particles)]
        axes.scatter([t + 1] * particles, range(particles), s=4 + 90 * weights[t].numpy(), c=colour, zorder=3)
    line = trace.lineages()[:, 0, 0].tolist()  # [T]
    axes.plot(range(1, length + 1), line, color=SAMPLE, lw=1.6, zorder=2)
    for t, k in enumerate(line):
        token = tokenizer.decode([tokens[t][k]], skip_special_tokens=False).strip()
        axes.text(t + 1, particles, token, ha="left", va="bottom", fontsize=9, rotation=45, color=SAMPLE)
    axes.set(xlabel="step t", ylabel="particle", xticks=range(1, length + 1), xlim=(0.5, length + 0.5))
    axes.set_ylim(-1, particles)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
