"""The genealogy of one run as a picture: `python -m eval.sample ... --particles 24 --picture FILE`.

Each dot is a particle after step t, the larger the larger its weight; lines lead to the particles
that continue it, and at the end to the final samples. Blue particles have descendants among these,
grey ones do not. The orange line follows the ancestors of the sample with the largest phi, whose
tokens are written above. Bars compare phi of the whole texts.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from tokenizers import Tokenizer
from torch import Tensor

from eval.figures import save_figure
from tinystories.tokenizer import token_texts
from tsmc import Trace
from tsmc.resampling import normalise

ALIVE = "#0072B2"
DYING = "#C9C9C9"
SAMPLE = "#D55E00"


def draw_genealogy(trace: Trace, log_phi: Tensor, tokenizer: Tokenizer, path: Path) -> None:
    """Write the picture of the first run of a trace as PNG; log_phi [K] is that of its texts."""
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
