"""Means over seeds with 95 % intervals, and changes within seeds.

    mean over S seeds with its 95 % interval (Student's t): the seeds are the independent units
    changes are computed within each seed before they are averaged

All seeds share the M exact samples of sigma, so their error does not average out. It is that of the
mean of their terms (`eval/metrics.py`: terms_kl and terms_energy), for a change that of the
difference of terms, and is added in quadrature, to a mean KL also the error of log Z_sigma.
Intervals of shares are computed on the logit scale, those of positive numbers on the log scale;
where a value lies outside (an unbiased energy may be negative), the interval is cut there.
"""

import math

import numpy as np
import torch
from torch import Tensor

from tsmc.estimate import mean_estimate

POSITIVE = {"energy", "kl_target_proposal", "kl_target_model", "ess", "worth", "seconds"}
SHARES = {"toxicity", "distinct"}
TERMS = {"energy": "terms_energy", "kl_target_proposal": "terms_kl"}
Seeds = dict[int, dict]  # the rows of one place by seed


def interval(values: Tensor, error: float, kind: str) -> list[float]:
    """Mean, low and high of values [S], with the half-width `error` that all of them share.

    `kind` is "share", "positive" or "any".
    """
    mean = values.mean().item()
    is_inside = bool((values > 0).all()) and (kind == "positive" or bool((values < 1).all()))
    if kind == "positive" and is_inside:
        half = math.hypot(mean_estimate(values.log()).half_width(), error / mean)
        return [mean, mean * math.exp(-half), mean * math.exp(half)]
    if kind == "share" and is_inside:
        half = mean_estimate(values.logit()).half_width()
        half = math.hypot(half, error / (mean * (1 - mean)))
        centre = math.log(mean / (1 - mean))
        return [mean, 1 / (1 + math.exp(half - centre)), 1 / (1 + math.exp(-half - centre))]
    half = math.hypot(mean_estimate(values).half_width(), error)
    lowest, highest = {"share": (0, 1), "positive": (0, math.inf)}.get(kind, (-math.inf, math.inf))
    return [mean, max(mean - half, lowest), min(mean + half, highest)]


def change(before: Seeds, after: Seeds, names: tuple[str, ...]) -> Seeds:
    """after - before within each seed that has both."""
    rows = {}
    for seed in sorted(before.keys() & after.keys()):
        old, new = before[seed], after[seed]
        row = {}
        for name in names:
            if None not in (old.get(name), new.get(name)):
                row[name] = new[name] - old[name]
                if name in TERMS:
                    terms = TERMS[name]
                    row[terms] = np.subtract(new[terms], old[terms]).tolist()
        rows[seed] = row
    return rows


def numbers_of(seeds: Seeds, log_z_error: float, is_change: bool = False) -> dict[str, list[float]]:
    """[mean, low, high] of every number that the rows of all seeds have; of one seed [value]."""
    rows = list(seeds.values())
    numbers = {}
    for name in rows[0] if rows else ():
        each = [row.get(name) for row in rows]
        are_numbers = all(type(value) in (int, float) for value in each)
        if not are_numbers or name == "generation" or name.endswith("_half_width"):
            continue
        values = torch.tensor(each, dtype=torch.float64)
        kind = "positive" if name in POSITIVE else "share" if name in SHARES else "any"
        found = [values.item()] if len(each) == 1 else []
        if len(each) > 1:
            error = shared_error(name, rows, 0.0 if is_change else log_z_error)
            found = interval(values, error, "any" if is_change else kind)
        elif name in SHARES and f"{name}_half_width" in rows[0]:
            found = interval(values.repeat(2), rows[0][f"{name}_half_width"], kind)
        numbers[name] = [float(f"{number:.6g}") for number in found]
    return numbers


def shared_error(name: str, rows: list[dict], log_z_error: float) -> float:
    """Half of the 95 % interval of what the exact samples add to a mean over seeds."""
    terms = [row.get(TERMS.get(name, "")) for row in rows]
    if any(values is None for values in terms):
        return 0.0
    half = mean_estimate(torch.tensor(np.array(terms)).mean(0)).half_width()
    return math.hypot(half, log_z_error) if name == "kl_target_proposal" else half
