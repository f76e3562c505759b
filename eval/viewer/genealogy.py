"""The genealogy of the particles as one page of HTML that needs nothing else: `python -m tsmc RUN --html FILE`.

The page is `genealogy.html` with the traces in it as JSON, a population for each generation and prompt. Particles with the same
prefix s_{1:t} share psi, w and weight, so that they are one node of step t. A node is a list:

    parent     place of s_{1:t-1} among the nodes of step t - 1       share   of the population's weight, the node's together
    token      place of s_t in `vocabulary`                           final   how many of the K final samples descend from it
    count      particles in the node                                  log_psi, log_w   as in the trace

Nodes follow the order of their parents, so lines from parents to children never cross. Numbers are rounded, null for minus
infinity. K particles, T steps.
"""

import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer

from eval.viewer.draws import Draws
from tsmc import Trace
from tsmc.weights import normalise

TEMPLATE = Path(__file__).with_name("genealogy.html")
PLACE = "{{data}}"
QUARTILES = (0, 0.25, 0.5, 0.75, 1)


def rounded(values: list | float, digits: int = 2) -> list | float | None:
    """Nested lists of numbers, short enough for a page; None for what is not finite."""
    if isinstance(values, list):
        return [rounded(value, digits) for value in values]
    return round(values, digits) if math.isfinite(values) else None


def merge_identical(trace: Trace, place: dict[int, int]) -> list[list[list]]:
    """The nodes of every step; `place` numbers the tokens."""
    tokens, ancestors, lineages = (x[:, 0].cpu() for x in (trace.tokens, trace.ancestors, trace.lineages()))  # [T, K]
    log_psi, log_w = (x[:, 0].cpu() for x in (trace.log_psi, trace.log_w))
    weights = normalise(trace.log_weights[:, 0].cpu().double())
    parent, steps = torch.zeros_like(tokens[0]), []
    for t in range(len(tokens)):
        prefixes = torch.stack([parent, tokens[t]], -1)
        pairs, node, count = prefixes.unique(dim=0, return_inverse=True, return_counts=True)  # [D, 2], [K], [D]
        some = {n: k for k, n in enumerate(node.tolist())}  # a particle of each node: identical ones share all numbers
        particle = [some[n] for n in range(len(pairs))]
        share = torch.zeros(len(pairs), dtype=torch.float64).index_add(0, node, weights[t])
        columns = (
            pairs[:, 0].tolist(),
            [place[token] for token in pairs[:, 1].tolist()],
            count.tolist(),
            rounded(log_psi[t, particle].tolist()),
            rounded(log_w[t, particle].tolist()),
            rounded(share.tolist(), 5),
            node[lineages[t]].bincount(minlength=len(pairs)).tolist(),
        )
        steps.append([list(row) for row in zip(*columns, strict=True)])
        parent = node[ancestors[t]]
    return steps


def population_data(draws: Draws, tokenizer: Tokenizer) -> dict:
    """What the page shows of one prompt in one generation."""
    trace = draws.trace
    vocabulary = trace.tokens[:, 0].unique().tolist()
    log_w = trace.log_w[:, 0].sort().values  # [T, K]
    nearest = [round(q * (log_w.shape[1] - 1)) for q in QUARTILES]  # by rank: no sums of infinities
    named = ("text", "weight", "particles", "copies", "log_phi", "score")
    return {
        "prompt": draws.prompt,
        "vocabulary": [tokenizer.decode([token], skip_special_tokens=False) for token in vocabulary],
        "nodes": merge_identical(trace, {token: i for i, token in enumerate(vocabulary)}),
        "log_w": rounded(log_w[:, nearest].tolist()),
        "ess": rounded(trace.ess[:, 0].tolist()),
        "log_z_hat": rounded(trace.log_z[:, 0].tolist(), 3),
        "continued": [len(set(step)) for step in trace.ancestors[:, 0].tolist()],
        "distinct": [
            [value if isinstance(value, str) else rounded(value, 4) for value in (getattr(row, name) for name in named)]
            for row in draws.distinct
        ],
    }


def page(drawn: dict[int, list[Draws]], about: dict, tokenizer: Tokenizer, log_z_sigma: dict[str, float]) -> str:
    """The page of the populations of one or more generations, each after the same prompts.

    `about` names the run, how many runs, K, T, the seed and the options; `log_z_sigma` is by prompt, where it is known.
    """
    populations = [
        {"generation": m, "log_z_sigma": log_z_sigma.get(draws.prompt), **population_data(draws, tokenizer)}
        for m, prompts in drawn.items()
        for draws in prompts
    ]
    data = {"about": about, "populations": populations}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, safe)
