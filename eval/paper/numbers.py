"""Every number of a study in one table, which the report, its figures, results.json and results.csv are all made from.

    mean over seeds with its 95 % interval (Student's t), the seeds being the independent units; of a quantity that is
    bounded the interval is that of its logarithm or logit, so that it holds only what is possible
    changes are taken within each seed before they are averaged
    KL(sigma||q) of all seeds rests on the same exact samples of sigma, whose error does not average out and is added

A number is known by its place and its quantity; among seeds, "mean" is the mean over all that ran it. N exact samples, S seeds.
"""

import csv
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.paper.study import NAMES, NEVER, TSMC, VARIANTS, Part, Place, StudyConfig, scheme_name, tsmc_cost
from eval.paper.task import distance, nearest, read_part, target_row, with_half_width
from tinystories.checkpoint import read_json, write_text
from tsmc.estimate import Estimate, difference, mean_estimate


class Quantity(NamedTuple):
    """What is measured: its unit, the least and the greatest value that is possible, its title and digits in the report."""

    unit: str
    lowest: float
    highest: float
    title: str = ""
    digits: int = 2


INFINITY = math.inf
COUNT = Quantity("count", 0.0, INFINITY)
QUANTITIES = {
    "acceptance": Quantity("share", 0.0, 1.0, "Acceptance in %", 3),
    "toxic_share": Quantity("share", 0.0, 1.0, "At 0.5 and above in %", 2),
    "twist_share": Quantity("share", 0.0, INFINITY, "Twist in %", 0),
    "distinct": Quantity("share", 0.0, 1.0, "Distinct"),
    "toxicity": Quantity("probability", 0.0, 1.0, "Toxicity", 3),
    "model_toxicity": Quantity("probability", 0.0, 1.0, "Toxicity of bare p⁽ᵐ⁾"),
    "similarity": Quantity("cosine", -1.0, 1.0, "Similarity", 3),
    "energy": Quantity("distance of embeddings", -INFINITY, INFINITY, "Energy distance", 3),
    "distance": Quantity("distance on the plane", 0.0, INFINITY, "Distance to Target", 3),
    "kl": Quantity("nats", 0.0, INFINITY, "KL(σ‖q)"),
    "kl_base": Quantity("nats", 0.0, INFINITY, "KL(σ‖q)"),
    "drift": Quantity("nats", 0.0, INFINITY, "Drift KL(σ‖σ_m)"),
    "log_z": Quantity("nats", -INFINITY, INFINITY, "log Z"),
    "log_z_std_error": Quantity("nats", 0.0, INFINITY),
    "log_z_hat": Quantity("nats", -INFINITY, INFINITY, "log Ẑ"),
    "log_z_hat_mean": Quantity("nats", -INFINITY, INFINITY, "log Ẑ"),
    "log_z_hat_std": Quantity("nats", 0.0, INFINITY, "Spread of log Ẑ"),
    "ess": Quantity("particles", 1.0, INFINITY, "ESS", 1),
    "fluency": Quantity("nats per token", -INFINITY, 0.0, "log p⁽⁰⁾ a token"),
    "units": Quantity("token positions", 0.0, INFINITY, "Token positions", 0),
}
COUNTS = {"scored": "Texts scored", "sequences": "Accepted", "proposals": "of proposals", "runs": "Runs a seed"}
COUNTS |= {"updates": "Updates", "batch_size": "Batch"}
QUANTITIES |= {name: COUNT._replace(title=title, digits=0) for name, title in COUNTS.items()}
PAPER = Path(__file__).parent / "report" / "paper.json"  # what the paper reports


@dataclass(frozen=True)
class Number:
    """One value with its 95 % interval, if it has one."""

    section: str
    name: str
    seed: int | str
    generation: int | str
    quantity: str
    value: float | None
    low: float | None
    high: float | None
    unit: str
    seeds: int | None  # how many runs it is a mean of


class Numbers:
    """The table."""

    def __init__(self):
        self.rows: dict[tuple, Number] = {}
        # [N] of the exact samples: log q for "kl", log p^(m) phi for "drift"
        self.log_density: dict[tuple, Tensor] = {}
        self.log_sigma = torch.zeros(0)  # [N] log p^(0) phi of the exact samples
        self.log_z = Estimate(0.0, 0.0, INFINITY)

    def add(self, place: Place, quantity: str, value: Any, seeds: int | None = None) -> None:
        """A plain number, or one with its limits; `seeds` of a mean."""
        limits = value if isinstance(value, dict) else {"value": value, "low": None, "high": None}
        unit = QUANTITIES.get(quantity, COUNT).unit
        self.rows[*place, quantity] = Number(*place, quantity, **limits, unit=unit, seeds=seeds)

    def add_row(self, row: dict, place: Place | None = None) -> None:
        """Every number of a part's row, at its own place if none is named, and the densities of the exact samples."""
        place = place or tuple(row["place"])
        for quantity, value in row.items():
            if isinstance(value, dict | int | float):
                self.add(place, quantity, value)
        for quantity, density in (("kl", "log_q"), ("drift", "log_sigma_m")):
            if density in row:
                self.log_density[*place, quantity] = tensor_of(row[density])

    def get(self, place: Place, quantity: str) -> Number | None:
        """The number, or None."""
        return self.rows.get((*place, quantity))

    def changed(self, name: str, quantity: str) -> Number | None:
        """The mean of the changes of that name; None where one is infinite."""
        return self.get(("changes", name, "mean", ""), quantity)

    def names(self, section: str, method: str = "") -> list[str]:
        """The names in a section, in order; of a baseline's runs alone if one is named."""
        start = f"{NAMES[method]}, lr" if method else ""
        return list(dict.fromkeys(key[1] for key in self.rows if key[0] == section and key[1].startswith(start)))

    def values(self, places: list[Place], quantity: str) -> list[float] | None:
        """The values at several places, or None where one is missing or infinite."""
        numbers = [self.get(place, quantity) for place in places]
        known = all(number is not None and number.value is not None for number in numbers)
        return [number.value for number in numbers] if known else None

    def seeds(self, section: str, name: str) -> set[int | str]:
        """The seeds that have a run of that name, diverged or not."""
        return {seed for of, other, seed, _, _ in self.rows if (of, other) == (section, name)}

    def average(self, section: str, seeds: tuple[int, ...], label: str = "mean") -> None:
        """Means over those of the seeds that ran it, for every name, generation and quantity that none of them lacks."""
        keys = dict.fromkeys((name, m, quantity) for of, name, _, m, quantity in self.rows if of == section)
        ran = {name: self.seeds(section, name) for name in dict.fromkeys(name for name, _, _ in keys)}
        for name, m, quantity in keys:
            places = [(section, name, seed, m) for seed in seeds if seed in ran[name]]
            if places and (values := self.values(places, quantity)) is not None:
                limits, shared = QUANTITIES.get(quantity, COUNT), self.shared_error(places, quantity)
                mean = mean_of(values, shared, limits.lowest, limits.highest)
                self.add((section, name, label, m), quantity, mean, len(places))

    def shared_error(self, places: list[Place], quantity: str) -> Estimate | None:
        """The error that the exact samples and log Z of sigma leave in the mean of a divergence from sigma over places."""
        keys = [(*place, quantity) for place in places]
        if not all(key in self.log_density for key in keys):
            return None
        log_density = torch.stack([self.log_density[key] for key in keys])  # [S, N]
        return difference(mean_estimate(self.log_sigma - log_density.mean(0)), self.log_z)

    def add_changes(self, name: str, quantities: tuple[str, ...], before: list[Place], after: list[Place]) -> None:
        """Section `changes`: differences within seeds, before and after holding a place for each, and their means.

        Those of KL(sigma||q) are paired over the exact samples: KL_b - KL_a = E_sigma[log q_a - log q_b].
        """
        for quantity in quantities if before else ():
            ends, shared = (self.values(before, quantity), self.values(after, quantity)), None
            if None in ends:
                continue
            differences = [b - a for a, b in zip(*ends, strict=True)]
            if quantity == "kl":
                log_q = [
                    torch.stack([self.log_density[*place, "kl"] for place in places]) for places in (before, after)
                ]
                drops = log_q[0] - log_q[1]  # [S, N]
                differences, shared = drops.mean(1).tolist(), mean_estimate(drops.mean(0))
            for place, value in zip(before, differences, strict=True):
                self.add(("changes", name, place[2], ""), quantity, value)
            self.add(("changes", name, "mean", ""), quantity, mean_of(differences, shared), len(before))


def tensor_of(values: list[float | None]) -> Tensor:
    """Log-probabilities [N] from a part's file, where null stands for -inf."""
    return torch.tensor([-INFINITY if value is None else value for value in values], dtype=torch.float64)


def mean_of(
    values: list[float], shared: Estimate | None = None, lowest: float = -INFINITY, highest: float = INFINITY
) -> dict[str, float | None]:
    """Mean and 95 % interval over seeds, the half width of an error that all share added in quadrature; none for one value."""
    estimate = mean_estimate(torch.tensor(values, dtype=torch.float64))
    half = math.hypot(estimate.half_width(), shared.half_width() if shared else 0.0)
    return with_half_width(estimate.value, half, lowest, highest)


def collect(study: StudyConfig, parts: list[Part], out: Path) -> tuple[Numbers, list[dict]]:
    """All numbers of the finished parts, and the texts by set: every beta's, the first seed's and the best baselines'."""
    numbers, texts, target, first = Numbers(), [], target_row(out, study), study.seeds[0]
    numbers.log_sigma = tensor_of(target["log_sigma"])
    numbers.log_z = Estimate(target["log_z"]["value"], target["log_z_std_error"], target["proposals"] - 1.0)
    sweeps: dict[str, list[dict]] = {method: [] for method in study.methods}
    for part in parts:
        for row in read_part(out, part.name):
            section, name, seed, m = row["place"]
            if section in ("rejection", "generations", "resampling", "sweep", "best") and "failed" not in row:
                row["distance"] = distance(row, target)
            numbers.add_row(row)
            if section == "sweep":
                sweeps[part.method].append(row)
            elif "texts" in row and (section == "rejection" or (name, seed) == (TSMC, first)):
                label = name.replace("beta", "β =") if section == "rejection" else f"Generation {m}"
                texts.append({"set": label, "seed": first, "texts": row["texts"]})
    for sweep in sweeps.values():
        best = sweep[nearest(sweep, target)]
        name = best["place"][1]
        numbers.add_row(best, ("best", name, first, ""))
        texts += [{"set": f"Best {name}", "seed": first, "texts": best["texts"]}] if "texts" in best else []
    for section in ("generations", "particles", "resampling", "best"):
        numbers.average(section, study.seeds)
    numbers.average("best", study.seeds[1:], "other seeds")
    add_comparisons(study, numbers)
    cost = tsmc_cost(study.run)
    numbers.add_row({"units": cost.units(study.run.length), "scored": cost.sampled}, ("budget", TSMC, "", ""))
    for row in read_json(PAPER)["rows"]:
        numbers.add_row(row)
    return numbers, texts


def add_comparisons(study: StudyConfig, numbers: Numbers) -> None:
    """Section `changes`, which the claims of the report rest on."""
    last, few, many = study.run.generations, min(study.particle_counts), max(study.particle_counts)
    measures = ("toxicity", "similarity", "energy", "log_z", "log_z_hat_mean", "distance", "kl")
    whole = f"generation 0 to {last}"

    def change(name: str, quantities: tuple[str, ...], *ends: tuple[str, str, int | str]) -> None:
        ran = set(study.seeds).intersection(*(numbers.seeds(section, of) for section, of, _ in ends))
        before, after = ([(section, of, seed, m) for seed in sorted(ran)] for section, of, m in ends)
        numbers.add_changes(name, quantities, before, after)

    for variant in VARIANTS:
        name, title = NAMES[variant], "" if variant == "tsmc" else f"{NAMES[variant]}, "
        for a, b in [(m, m + 1) for m in range(last)] + ([(0, last)] if last > 1 else []):
            change(f"{title}generation {a} to {b}", measures, ("generations", name, a), ("generations", name, b))
        if variant != "tsmc":
            change(f"{TSMC} to {name}", measures, ("generations", TSMC, last), ("generations", name, last))
    for title in ("", f"{NAMES['pooled']}, "):
        for count in [f"{title}K = {count}" for count in study.particle_counts]:
            ends = ("particles", count, 0), ("particles", count, last)
            change(f"{count}, {whole}", ("toxicity", "log_z_hat"), *ends)
        ends = ("particles", f"{title}K = {many}", 0), ("particles", f"{title}K = {few}", last)
        change(f"{title}K = {many}, generation 0 to K = {few}, generation {last}", ("toxicity", "log_z_hat"), *ends)
    for scheme in dict.fromkeys((own_scheme(study), NEVER)):
        ends = ("resampling", scheme, 0), ("resampling", scheme, last)
        change(f"{scheme}, {whole}", ("toxicity", "log_z_hat", "log_z_hat_std", "distance"), *ends)
    for name in numbers.names("best"):
        for ours in (TSMC, NAMES["late"], NAMES["pooled"]):
            change(f"{ours} to {name}", ("distance", "energy", "kl"), ("generations", ours, last), ("best", name, ""))
    target = numbers.get(study.target_place(), "similarity")
    for m in range(last + 1):
        mean = numbers.get(("generations", TSMC, "mean", m), "similarity")
        numbers.add(("changes", f"Target to generation {m}", "mean", ""), "similarity", gap(target, mean))


def own_scheme(study: StudyConfig) -> str:
    """The row of the resampling table that resamples as the runs of the study do."""
    return scheme_name(study.run.resampling, study.run.ess_threshold)


def gap(one: Number, other: Number) -> dict[str, float | None]:
    """other - one of independent numbers, half widths in quadrature."""
    halves = (INFINITY if row.low is None or row.high is None else (row.high - row.low) / 2 for row in (one, other))
    return with_half_width(other.value - one.value, math.hypot(*halves))


def write_results(numbers: Numbers, texts: list[dict], out: Path) -> None:
    """results.json and results.csv."""
    rows = [asdict(number) for number in numbers.rows.values()]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)  # one number a line
    write_text(
        out / "results.json", f'{{"numbers": [\n{lines}\n],\n"texts": {json.dumps(texts, ensure_ascii=False)}}}\n'
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "results.csv", text.getvalue())
