"""`python docs/picture.py` writes docs/picture.gif: twisted SMC in the world of docs/tiny.py.

K particles write words, first without a twist (psi = 1), then with the twist of each generation.
Each tree is the run whose log Z-hat is the median of RUNS runs; the bars count all of them.
"""

from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import tiny
import torch
from PIL import Image

tiny.GENERATIONS = 2
K, RUNS, T, N = 16, 201, tiny.T, tiny.N
KEY = "orange: a mirrored pair differs; area: weight; pale: is not copied"
ACTS = {
    "ψ = 1": "All weigh the same until φ compares whole words: too late.",
    "Generation 0": "The twist ψ has learned to look ahead, but not far.",
    "Generation 1": "p has learned from those words, then ψ learned anew.",
    "Generation 2": "Once more: nearly as many palindromes as under σ.",
}
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


def draw(steps, bars, name):
    """One frame: a run so far, and the shares of palindromes so far."""
    plt.close()
    canvas = plt.figure(figsize=(7, 4.6), dpi=100).canvas
    plt.axes((0, 0, 1, 1), xlim=(0.3, 15.5), ylim=(17.6, -2)).axis("off")
    plt.text(0.8, -1, name, size=16)
    plt.text(0.8, 17.1, ACTS[name], size=14)
    plt.text(15, -1, KEY, size=9.5, ha="right")
    for (t, (prefixes, shares, ancestors)), k in product(enumerate(steps, 1), range(K)):
        n = prefixes[k]
        alpha = 1 if k in ancestors else 0.3
        look = {"va": "center_baseline"}
        plt.text(t, k, WORDS[n][-1], color=COLOURS[n], alpha=alpha, ha="center", **look)
        plt.scatter(t, k, 20 + 110 * min(K * shares[k], 4), COLOURS[n], alpha=0.35 * alpha, lw=0)
        if t > 1:
            plt.plot([t - 0.7, t - 0.3], [steps[t - 2][2][k], k], "gray", alpha=alpha, lw=1)
        if t == T:
            n = prefixes[ancestors[k]]
            plt.text(t + 0.9, k, WORDS[n], color=COLOURS[n], family="monospace", **look)
            plt.plot([t + 0.3, t + 0.7], [ancestors[k], k], "gray", lw=1)
    plt.text(12, 0.3, f"palindromes in\n{RUNS} such runs", va="center")
    for row, (label, share) in enumerate(bars.items(), 1):
        plt.text(12, 2.6 * row, f"{label}: {share:.0%}")
        plt.barh(2.6 * row + 0.7, 3 * share, 0.7, left=12, color=COLOURS[0] if row > 1 else "gray")
    return Image.frombuffer("RGBA", (700, 460), canvas.print_to_buffer()[0]).convert("RGB")


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, tiny.V, dtype=torch.float64, generator=generator)
    base = tiny.language_model(logits)
    log_phi = -tiny.BETA * torch.tensor(DIFFERING[N:], dtype=torch.float64)
    sigma = tiny.enumerate_target(base, log_phi)[0][N:].exp()
    bars, frames = {"target σ": sigma[log_phi == 0].sum().item()}, []
    learned = [pair[:2] for pair in tiny.self_distilled_tsmc(logits, log_phi, generator)]
    for (log_p, log_psi), name in zip([(base, 0 * base), *learned], ACTS, strict=True):
        log_phi_m = tiny.effective_potential(base, log_phi, log_p)
        run, samples = trace(log_p, log_psi, log_phi_m, generator)
        frames += [draw(run[:t], bars, name) for t in range(1, T)]
        bars[name] = (log_phi[samples - N] == 0).double().mean().item()
        frames.append(draw(run, bars, name))
    more = {"append_images": frames[1:], "duration": ([600] * (T - 1) + [4000]) * len(ACTS)}
    frames[0].save(Path(__file__).with_name("picture.gif"), save_all=True, loop=0, **more)
