"""Means over seeds with 95 % intervals, changes within seeds, and a test of shares.

    mean over S seeds with its 95 % interval (Student's t): the seeds are the independent units
    changes are computed within each seed before they are averaged

All seeds share the M exact samples of sigma, so their error does not average out. It is that of the
mean of their `terms` (`eval/measure.py`), for a change that of the difference of terms, and is
added in quadrature, to a mean KL also the error of log Z_sigma. Intervals of shares are computed on
the logit scale, those of positive numbers on the log scale; where a value lies outside (an unbiased
energy may be negative), the interval is cut there. A share differs from that of the exact samples
by a two-sided test at 5 % / (number of words).
"""

import math

import numpy as np
import torch
from torch import Tensor

from tsmc.estimate import Estimate, difference, mean_estimate

POSITIVE = {"energy", "kl", "log_z_hat_std", "ess", "scores", "exact_texts", "gain", "seconds"}
SHARES = {"toxicity", "distinct", "ess_per_score", "accepted"}
COMPARED = ("toxicity", "similarity", "energy", "kl", "log_z_hat_mean", "log_z_hat_std")
Place = tuple[str, str, int | None]  # table, name, generation
Seeds = dict[int, dict]  # the rows of a place by seed


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


def change(before: Seeds, after: Seeds) -> Seeds:
    """after - before within each seed that has both."""
    rows = {}
    for seed in sorted(before.keys() & after.keys()):
        old, new = before[seed], after[seed]
        names = [name for name in COMPARED if None not in (old.get(name), new.get(name))]
        terms = {
            name: np.subtract(new["terms"][name], old["terms"][name])
            for name in ("energy", "kl")
            if name in names
        }
        rows[seed] = {name: new[name] - old[name] for name in names} | {"terms": terms}
    return rows


def numbers_of(place: Place, rows: list[dict], log_z_error: float) -> dict[str, list[float]]:
    """The mean of every quantity that all seeds have; of one seed its own interval, if any.

    Seconds are the mean of those seeds that have them.
    """
    numbers = {}
    for name in rows[0]:
        each = [row.get(name) for row in rows]
        if name == "seconds":  # a run that was continued has none
            each = [value for value in each if value is not None]
        are_numbers = bool(each) and all(isinstance(value, int | float) for value in each)
        if not are_numbers or name == "generation" or name.endswith("_half_width"):
            continue
        values = torch.tensor(each, dtype=torch.float64)
        kind = "positive" if name in POSITIVE else "share" if name in SHARES else "any"
        kind = {"changes": "any", "words": "share", "populations": "share"}.get(place[0], kind)
        own = rows[0].get(f"{name}_half_width")
        if len(each) > 1:
            error = shared_error(place, name, rows, log_z_error)
            found = interval(values, error, kind)
        elif own is not None:
            found = interval(values.repeat(2), own, kind)  # as if seeds did not differ
        else:
            found = [values.item()]
        numbers[name] = [float(f"{number:.6g}") for number in found]
    return numbers


def shared_error(place: Place, name: str, rows: list[dict], log_z_error: float) -> float:
    """Half of the 95 % interval of what the exact samples add to a mean over seeds."""
    terms = [row.get("terms", {}).get(name) for row in rows]
    if any(values is None for values in terms):
        return 0.0
    half = mean_estimate(torch.tensor(np.array(terms)).mean(0)).half_width()
    return math.hypot(half, log_z_error) if name == "kl" and place[0] != "changes" else half


def differs(shares: list[float], exact: float, count: int, level: float) -> bool:
    """Whether a mean share over seeds differs from that of `count` exact samples, two-sided."""
    error = math.sqrt(exact * (1 - exact) / count)
    found = mean_estimate(torch.tensor(shares, dtype=torch.float64))
    apart = difference(found, Estimate(exact, error, count - 1))
    return not apart.quantile(level / 2) <= 0 <= apart.quantile(1 - level / 2)
