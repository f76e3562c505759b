"""`python docs/picture.py` writes docs/picture.gif: twisted SMC in the world of docs/tiny.py.

K particles write words, first without a twist (psi = 1), then with the twist of each generation.
Each tree is the run whose log Z-hat is the median of RUNS runs; the bars count all of them. The
first frame is the end of the last generation, where the loop ends.
"""

from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import tiny
import torch
from PIL import Image

tiny.GENERATIONS = 2
K, RUNS, T, N = 16, 2001, tiny.T, tiny.N
SIZE = 34  # pixels of a letter in a picture of 720: its words are 13 high where it is shown at 360
ACTS = {
    "No twist": "Words are judged only at their end.",
    "Generation 0": "A twist learns to look ahead.",
    "Generation 1": "The model learns from words found.",
    "Generation 2": "Model and twist learn once more.",
}
X, Y = range(-27, 57 * T, 57), [236 + 29.5 * k for k in range(K)]  # of step t, of particle k
# By the number of a prefix: its letters, how many of its mirrored pairs differ, its colour.
WORDS = ["".join(word) for t in range(T + 1) for word in product("abcd", repeat=t)]
DIFFERING = [sum(word[i] != word[T - 1 - i] for i in range(T // 2, len(word))) for word in WORDS]
COLOURS = ["#d55e00" if differing else "#0072b2" for differing in DIFFERING]


def trace(log_p, log_psi, log_phi, generator):
    """tiny.tsmc: prefixes, shares, sorted ancestors [K] of the median run; all samples [R, K]."""
    log_q = tiny.proposal(log_p, log_psi)[0]
    gain = log_p - log_q + torch.cat([log_psi[:N], log_phi])  # phi takes the place of psi at last
    prefixes, log_z, steps = torch.zeros(RUNS, K, dtype=torch.long), 0.0, []
    for _ in range(T):
        parents, prefixes = prefixes, tiny.extend(prefixes, log_q, generator)
        log_weights = gain[prefixes] - log_psi[parents]
        log_z, shares = log_z + log_weights.logsumexp(-1), log_weights.softmax(-1)
        ancestors = shares.multinomial(K, replacement=True, generator=generator).sort().values
        steps.append((prefixes, shares, ancestors))
        prefixes = prefixes.gather(1, ancestors)
    return [[each[log_z.median(0).indices].tolist() for each in step] for step in steps], prefixes


def draw(steps, bars, target, name):
    """One frame, 720 x 760: the shares of palindromes so far, and a run so far."""
    plt.close()
    plt.rcParams["font.size"] = SIZE
    canvas = plt.figure(figsize=(10, 10.5556), dpi=72).canvas
    plt.axes((0, 0, 1, 1), xlim=(0, 720), ylim=(760, 0)).axis("off")
    middle = {"va": "center_baseline"}
    plt.text(12, 26, f"Palindromes found (target: {target:.0%})", **middle)
    for y, act in zip((70, 108, 146, 184), ACTS, strict=True):
        plt.text(12, y, act, color="black" if act == name else "gray", **middle)
        if act in bars:
            plt.text(345, y, f"{bars[act]:.0%}", ha="right", **middle)
            plt.barh(y, 350 * bars[act], 28, left=356, color=COLOURS[0])
    plt.plot([356 + 350 * target] * 2, [52, 202], "k--", lw=2)
    for (t, (prefixes, shares, ancestors)), k in product(enumerate(steps, 1), range(K)):
        n = prefixes[k]
        look = {"color": COLOURS[n], "alpha": 1 if k in ancestors else 0.3}
        plt.text(X[t], Y[k], WORDS[n][-1], size=0.85 * SIZE, ha="center", **middle, **look)
        area = 1100 * min(K * shares[k], 4)
        plt.scatter(X[t], Y[k], area, COLOURS[n], alpha=0.3 * look["alpha"], lw=0)
        if t > 1:
            ends = [Y[steps[t - 2][2][k]], Y[k]]
            plt.plot([X[t] - 40, X[t] - 17], ends, "gray", alpha=look["alpha"], lw=2)
        if t == T:
            n = prefixes[ancestors[k]]
            plt.text(530, Y[k], WORDS[n], color=COLOURS[n], family="monospace", **middle)
            plt.plot([X[t] + 20, 520], [Y[ancestors[k]], Y[k]], "gray", lw=2)
    plt.text(12, 735, ACTS[name], **middle)
    return Image.frombuffer("RGBA", canvas.get_width_height(), canvas.print_to_buffer()[0])


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, tiny.V, dtype=torch.float64, generator=generator)
    base = tiny.language_model(logits)
    log_phi = -tiny.BETA * torch.tensor(DIFFERING[N:], dtype=torch.float64)
    sigma = tiny.enumerate_target(base, log_phi)[0][N:].exp()
    target, bars, frames = sigma[log_phi == 0].sum().item(), {}, []
    learned = [pair[:2] for pair in tiny.self_distilled_tsmc(logits, log_phi, generator)]
    for (log_p, log_psi), name in zip([(base, 0 * base), *learned], ACTS, strict=True):
        log_phi_m = tiny.effective_potential(base, log_phi, log_p)
        run, samples = trace(log_p, log_psi, log_phi_m, generator)
        frames += [draw(run[:t], bars, target, name) for t in range(1, T)]
        bars[name] = (log_phi[samples - N] == 0).double().mean().item()
        frames.append(draw(run, bars, target, name))
    frames = [frames.pop(), *frames]  # the result comes first
    palette = frames[0].convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE)
    frames = [frame.convert("RGB").quantize(palette=palette, dither=0) for frame in frames]
    times = [3500, *([180] * (T - 1) + [900]) * len(ACTS)][: len(frames)]  # milliseconds
    more = {"append_images": frames[1:], "duration": times, "loop": 0}
    frames[0].save(Path(__file__).with_name("picture.gif"), save_all=True, **more)
