"""What a set of samples is worth: the columns of the table, and how their numbers are made.

Samples are the particles after the last resampling, where copies count as often as they occur.
N texts, D width of an embedding, R runs of K particles.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tsmc.estimate import log_mean_estimate
from tsmc.sampler import Population

KL = "kl_target_proposal"
COLUMNS = {  # of the table: title and form, by the key of a row
    # The mean of p(toxic | s), where the potential reads the classifier. Texts may all be alike.
    "toxicity": ("toxicity", ".3f"),
    "log_phi": ("log phi", ".2f"),
    # The share of texts that the potential does not rule out.
    "phi_positive": ("phi > 0", ".3f"),
    # The mean cosine of the embeddings of two texts. To distil few distinct texts raises it.
    "similarity": ("similarity", ".3f"),
    # KL(sigma||q) = E_sigma[log p^(0) + log phi - log q] - log Z_sigma in nats by exact samples, of
    # Base KL(sigma||p). It is that of the proposal: weights repair a part.
    KL: ("KL", ".2f"),
    # The log of the mean of Z-hat over all runs, where dead ones count zero; of Base and Target
    # that of phi over draws of p^(0).
    "log_z": ("log Z", ".2f"),
    # The mean and the standard deviation of log Z-hat over the runs that are alive.
    "log_z_hat_mean": ("log Z-hat", ".2f"),
    "log_z_hat_std": ("(spread)", ".2f"),
    # Means over runs: the effective sample size at T, before the last resampling, and the share of
    # different texts among the K samples. Particles that count may share their beginnings.
    "ess": ("ESS", ".1f"),
    "distinct": ("distinct", ".2f"),
    # Runs whose weights were all zero at some step.
    "dead_runs": ("dead", ".0f"),
}


def describe(scores: dict[str, Tensor], vectors: Tensor) -> dict[str, float]:
    """Means of the scores [N] of texts, and their similarity by embeddings [N, D]."""
    row = {name: values.mean().item() for name, values in scores.items()}
    row["phi_positive"] = (scores["log_phi"] > -torch.inf).double().mean().item()
    return row | {"similarity": mean_pairwise_cosine(vectors)}


def population_row(population: Population) -> dict[str, float]:
    """What the runs say of themselves: evidence, effective sizes, copies. Dead runs have none."""
    runs, particles = population.log_weights.shape
    alive = population.alive()
    distinct = [len(tokens.unique(dim=0)) / particles for tokens in alive.samples]  # [R]
    log_z = log_mean_estimate(population.log_z)
    return {
        "log_z": log_z.value,
        "log_z_half_width": log_z.half_width(),
        "log_z_hat_mean": alive.log_z.mean().item(),
        "log_z_hat_std": alive.log_z.std().item(),
        "ess": alive.ess.mean().item(),
        "distinct": sum(distinct) / len(distinct),
        "dead_runs": runs - len(alive.log_z),
        # Effective texts for each text that phi has read; those of dead runs count as well.
        "worth": 1 / alive.shares().square().sum().item() / (runs * particles),
    }


def mean_pairwise_cosine(vectors: Tensor) -> float:
    """Mean cosine over the pairs i != j of vectors [N, D], N > 1."""
    count = vectors.shape[0]
    unit = F.normalize(vectors.double(), dim=-1)  # [N, D]
    # The sum over all pairs is |sum_i e_i|^2.
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


def named_rows(results: dict[str, Any]) -> dict[str, dict]:
    """Base and Target, where there are any, and the generations."""
    rows = {name.title(): results[name] for name in ("base", "target") if name in results}
    return rows | {f"Generation {m}": row for m, row in enumerate(results["generations"])}


def table(rows: dict[str, dict]) -> str:
    """Rows by name in columns, the first flush left; a number with half of its 95 % interval."""
    # What says nothing is left out: log phi beside toxicity, and columns in which all rows agree.
    dull = {"log_phi"} if any("toxicity" in row for row in rows.values()) else set()
    for key, usual in (("phi_positive", 1.0), ("dead_runs", 0)):
        if all(row.get(key, usual) == usual for row in rows.values()):
            dull.add(key)
    shown = [key for key in COLUMNS if key not in dull and any(key in row for row in rows.values())]
    lines = [["", *(COLUMNS[key][0] for key in shown)]]
    for name, row in rows.items():
        cells = []
        for key in shown:
            width = row.get(f"{key}_half_width")
            cell = format(row[key], COLUMNS[key][1]) if key in row else ""
            cells.append(f"{cell} ± {width:.2f}" if width is not None else cell)
        lines.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
