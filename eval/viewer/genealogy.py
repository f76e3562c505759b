"""The genealogy of the particles as one self-contained page: `python -m tsmc RUN --html FILE`.

The page is `genealogy.html` with the trace of the first run of each generation in it as JSON.
Particles with the same prefix s_{1:t} have the same psi, w and weight, and form one node of step t:

    [parent, token, count, log_psi, log_w, share, final]

    parent   index of s_{1:t-1} in step t - 1       share   weight of these particles together
    token    text of s_t                            final   how many final samples descend from them
    count    number of particles

Nodes are sorted by their parents, so lines from parents to children never cross; null stands for
minus infinity. K particles, T steps, D nodes of a step.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from eval.run.run import finite_or_null
from tsmc.resampling import normalise
from tsmc.sampler import Step
from twist import Drawn

TEMPLATE = Path(__file__).with_name("genealogy.html")


def population_data(drawn: Drawn, tokenizer: Tokenizer) -> dict:
    """What the page shows of the first run of one generation."""
    names = Step.__annotations__
    first = {name: getattr(drawn.trace, name)[:, 0].cpu() for name in names}  # [T] or [T, K]
    weights = normalise(first["log_weights"].double())  # [T, K]
    lineages = drawn.trace.lineages()[:, 0].cpu()  # [T, K]
    parent = torch.zeros_like(lineages[0])  # [K]
    steps = []
    for t, tokens in enumerate(first["tokens"]):
        prefixes = torch.stack([parent, tokens], -1)  # [K, 2]
        pairs, node, count = prefixes.unique(dim=0, return_inverse=True, return_counts=True)
        member = torch.empty_like(count).scatter(0, node, torch.arange(len(node)))  # [D]
        nodes = zip(
            pairs[:, 0].tolist(),
            tokenizer.decode_batch(pairs[:, 1:].tolist(), skip_special_tokens=False),
            count.tolist(),
            first["log_psi"][t, member].tolist(),
            first["log_w"][t, member].tolist(),
            node.bincount(weights[t]).tolist(),
            node[lineages[t]].bincount(minlength=len(pairs)).tolist(),
            strict=True,
        )
        steps.append([list(values) for values in nodes])
        parent = node[first["ancestors"][t]]
    scored = [name for name in ("log_phi", "toxicity") if name in drawn.scores]
    log_w = first["log_w"].sort().values  # [T, K]
    ranks = [round(share * (len(parent) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)]
    return {
        "nodes": steps,
        "scores": {name: drawn.scores[name][member].tolist() for name in scored},  # at T
        "pooled_ess": drawn.ess,
        "log_w": log_w[:, ranks].tolist(),
        "ess": first["ess"].tolist(),
        "log_z_hat": first["log_z"].tolist(),
        "continued": [len(set(step)) for step in first["ancestors"].tolist()],
    }


def page(
    drawn: dict[int | None, Drawn], about: dict, tokenizer: Tokenizer, log_z: float | None
) -> str:
    """The page of one or more generations; `about` holds the options, log_z is exact if known."""
    populations = [{"generation": m} | population_data(drawn[m], tokenizer) for m in drawn]
    data = {"about": about, "log_z_sigma": log_z, "populations": populations}
    text = json.dumps(finite_or_null(data), separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", text)
