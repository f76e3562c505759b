"""Every number of a study in one table, which the report, its figures, results.json and results.csv are all made from.

    mean over seeds +- half of the 95 % interval (Student's t), the seeds being the independent units
    changes are taken within each seed before they are averaged

A row has a section, a name in it, a seed ("mean" over all of them, "" where none applies), a generation, a quantity.
"""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.paper.study import VARIANTS, Part, StudyConfig, tsmc_scored, tsmc_units
from eval.paper.task import BINS, distance, read_part
from tinystories.checkpoint import write_json, write_text
from tsmc.estimate import Estimate, difference, mean_estimate

NAMES = {
    "tsmc": "TSMC",
    "no-effective": "TSMC without φ⁽ᵐ⁾",
    "lora": "TSMC, LoRA",
    "dpo-full": "DPO, full",
    "dpo-lora": "DPO, LoRA",
    "grpo-full": "GRPO, full",
    "grpo-lora": "GRPO, LoRA",
}
UNITS = {
    "toxicity": "probability",
    "similarity": "cosine",
    "kl": "nats",
    "kl_base": "nats",
    "drift": "nats",
    "log_z": "nats",
    "log_z_hat": "nats",
    "log_z_hat_mean": "nats",
    "log_z_hat_std": "nats",
    "ess": "particles",
    "acceptance": "share",
    "toxic_share": "share",
    "distinct": "share",
    "model_toxicity": "probability",
    "distance": "distance on the plane",
    "fluency": "nats per token",
    "units": "token positions",
}


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


FEW_RUNS = 8  # percentiles over fewer runs than that cover too little to be called a 95 % interval


class Numbers:
    """The table, by section, name, seed, generation and quantity."""

    def __init__(self):
        self.rows: dict[tuple, Number] = {}

    def add(self, section: str, name: str, seed: int | str, generation: int | str, quantity: str, found: Any) -> None:
        """A plain number, or one with its limits."""
        found = found if isinstance(found, dict) else {"value": found, "low": None, "high": None}
        key = section, name, seed, generation, quantity
        self.rows[key] = Number(*key, **found, unit=UNITS.get(quantity, "count"))

    def add_row(self, section: str, name: str, seed: int | str, generation: int | str, row: dict) -> None:
        """Every number of a part's row."""
        for quantity, found in row.items():
            is_number = isinstance(found, dict) or (isinstance(found, int | float) and not isinstance(found, bool))
            if is_number and quantity not in ("generation", "place", "seed"):
                self.add(section, name, seed, generation, quantity, found)

    def get(self, section: str, name: str, seed: int | str, generation: int | str, quantity: str) -> Number | None:
        """The row, or None."""
        return self.rows.get((section, name, seed, generation, quantity))

    def names(self, section: str) -> list[str]:
        """The names in a section, in order."""
        return list(dict.fromkeys(key[1] for key in self.rows if key[0] == section))

    def average(self, section: str, seeds: Iterable[int]) -> None:
        """Means over the seeds, for every name, generation and quantity of a section that all seeds have a value of."""
        seeds = list(seeds)
        for _, name, _, generation, quantity in [key for key in self.rows if key[0] == section]:
            found = [self.get(section, name, seed, generation, quantity) for seed in seeds]
            if all(row is not None and row.value is not None for row in found):
                self.add(section, name, "mean", generation, quantity, mean_of([row.value for row in found]))


def mean_of(values: list[float], shared: Estimate | None = None) -> dict[str, float | None]:
    """Mean and 95 % interval over seeds, wider by an error that all seeds share; no interval for one value alone."""
    estimate = mean_estimate(torch.tensor(values, dtype=torch.float64))
    if shared is not None and math.isfinite(estimate.std_error):
        estimate = difference(estimate, Estimate(0.0, shared.std_error, shared.dof))
    half = estimate.half_width()
    if not math.isfinite(half):
        return {"value": estimate.value, "low": None, "high": None}
    return {"value": estimate.value, "low": estimate.value - half, "high": estimate.value + half}


def scheme_name(scheme: str, threshold: float) -> str:
    """A row of the resampling table."""
    return {1.0: f"{scheme}, every step", 0.5: f"{scheme}, ESS < K/2", 0.0: "never before the last token"}[threshold]


def collect(study: StudyConfig, parts: list[Part], out: Path) -> tuple[Numbers, list[dict]]:
    """All numbers of the finished parts, and the texts by set."""
    numbers, texts = Numbers(), []
    found = {part.name: read_part(out, part.name) for part in parts}
    for row in found["rejection"]["rows"]:
        name = f"beta {row['beta']:g}"
        numbers.add_row("rejection", name, "", "", row)
        for place, count in enumerate(row["histogram"]):
            numbers.add("histogram", name, "", "", f"toxicity in {place / BINS:.2f}..{(place + 1) / BINS:.2f}", count)
        numbers.add(
            "rejection", name, "", "", "toxic_share", sum(row["histogram"][BINS // 2 :]) / sum(row["histogram"])
        )
        texts.append({"set": f"β = {row['beta']:g}", "seed": study.seeds[0], "texts": row["texts"]})
    for variant in VARIANTS:
        for seed in study.seeds:
            for row in found[f"{variant}-{seed}"]["rows"]:
                row["distance"] = distance(row, target_row(study, found))
                numbers.add_row("generations", NAMES[variant], seed, row["generation"], row)
                if (variant, seed) == ("tsmc", study.seeds[0]):
                    texts.append({"set": f"Generation {row['generation']}", "seed": seed, "texts": row["texts"]})
    for seed in study.seeds:
        for row in found[f"particles-{seed}"]["rows"]:
            if row["runs"] < FEW_RUNS:
                row |= {name: row[name]["value"] for name in ("toxicity", "similarity")}
            numbers.add_row("particles", f"K = {row.pop('particles')}", seed, row["generation"], row)
        for row in found[f"resampling-{seed}"]["rows"]:
            name = scheme_name(row.pop("scheme"), row.pop("threshold"))
            numbers.add_row("resampling", name, seed, row["generation"], row)
    add_baselines(study, parts, found, numbers, texts)
    for section in ("generations", "particles", "resampling", "best"):
        numbers.average(section, study.seeds)
    add_changes(study, numbers)
    add_kl_changes(study, numbers, found)
    numbers.add("budget", NAMES["tsmc"], "", "", "units", tsmc_units(study.run))
    numbers.add("budget", NAMES["tsmc"], "", "", "scored", tsmc_scored(study.run))
    return numbers, texts


def target_row(study: StudyConfig, found: dict[str, dict]) -> dict:
    """The row of the rejection table that is Target."""
    return next(row for row in found["rejection"]["rows"] if row["beta"] == study.run.beta)


def setting(row: dict) -> str:
    """The name of one run of a sweep."""
    step, decay = row["learning_rate"], row["weight_decay"]
    return f"{NAMES[row['method']]}, lr {step:g}, decay {decay:g}, b {row['strength']:g}"


def setting_names(numbers: Numbers, section: str, method: str) -> list[str]:
    """The names of a method's runs in a section."""
    return [name for name in numbers.names(section) if name.startswith(f"{NAMES[method]}, lr")]


def add_baselines(
    study: StudyConfig, parts: list[Part], found: dict[str, dict], numbers: Numbers, texts: list[dict]
) -> None:
    """Section `sweep` on the first seed, and section `best`: the run nearest to Target, and its settings on other seeds."""
    target, first = target_row(study, found), study.seeds[0]
    for method in study.methods:
        sweep = [found[part.name] for part in parts if part.method == method and part.kind == "baseline"]
        others = [found[part.name] for part in parts if part.method == method and part.kind == "best"]
        for row in (*sweep, *others):
            if "failed" not in row:
                row["distance"] = distance(row, target)
        for row in sweep:
            numbers.add_row("sweep", setting(row), first, "", row)
        best = min(sweep, key=lambda row: distance(row, target))
        for row in (best, *others):
            numbers.add_row("best", setting(best), row["seed"], "", row)
        if "texts" in best:
            texts.append({"set": f"Best {setting(best)}", "seed": first, "texts": best["texts"]})
        for quantity in ("toxicity", "similarity", "kl", "distance", "fluency"):
            values = [row[quantity] for row in others if quantity in row]
            values = [value["value"] if isinstance(value, dict) else value for value in values]
            if values and len(values) == len(others):
                numbers.add("best", setting(best), "other seeds", "", quantity, mean_of(values))


def generation_steps(last: int) -> list[tuple[int, int]]:
    """The pairs of generations that are compared: neighbours, and the first with the last."""
    return [(m, m + 1) for m in range(last)] + ([(0, last)] if last > 1 else [])


def add_changes(study: StudyConfig, numbers: Numbers) -> None:
    """Section `changes`: differences within seeds and their means, which the claims of the report rest on."""

    def change(name: str, section: str, quantity: str, one: tuple, other: tuple) -> None:
        pairs = []
        for seed in study.seeds:
            before, after = (numbers.get(where, n, seed, m, quantity) for where, n, m in (one, other))
            if before is None or after is None or before.value is None or after.value is None:
                return
            pairs.append(after.value - before.value)
            numbers.add(section, name, seed, "", quantity, pairs[-1])
        numbers.add(section, name, "mean", "", quantity, mean_of(pairs))

    last, few, many = study.run.generations, min(study.particle_counts), max(study.particle_counts)
    tsmc = [("generations", NAMES["tsmc"], m) for m in range(last + 1)]
    for quantity in ("toxicity", "similarity", "log_z_hat_mean", "distance"):
        for one, other in generation_steps(last):
            change(f"generation {one} to {other}", "changes", quantity, tsmc[one], tsmc[other])
        for variant in ("lora", "no-effective"):
            place = "generations", NAMES[variant], last
            change(f"{NAMES['tsmc']} to {NAMES[variant]}", "changes", quantity, tsmc[last], place)
    for count in study.particle_counts:
        places = [("particles", f"K = {count}", m) for m in (0, last)]
        change(f"K = {count}, generation 0 to {last}", "changes", "toxicity", *places)
    places = ("particles", f"K = {many}", 0), ("particles", f"K = {few}", last)
    change(f"K = {many}, generation 0 to K = {few}, generation {last}", "changes", "toxicity", *places)
    for name in numbers.names("best"):
        change(f"{NAMES['tsmc']} to {name}", "changes", "distance", tsmc[last], ("best", name, ""))
    target = numbers.get("rejection", f"beta {study.run.beta:g}", "", "", "similarity")
    for m in range(last + 1):
        row = numbers.get("generations", NAMES["tsmc"], "mean", m, "similarity")
        numbers.add("changes", f"Target to generation {m}", "mean", "", "similarity", gap(target, row))


def gap(one: Number, other: Number) -> dict[str, float | None]:
    """other - one of independent numbers, half widths in quadrature."""
    value = other.value - one.value
    if None in (one.low, one.high, other.low, other.high):
        return {"value": value, "low": None, "high": None}
    half = math.hypot((one.high - one.low) / 2, (other.high - other.low) / 2)
    return {"value": value, "low": value - half, "high": value + half}


def add_kl_changes(study: StudyConfig, numbers: Numbers, found: dict[str, dict]) -> None:
    """Changes of KL(sigma||q), paired over the exact samples of sigma: KL_b - KL_a = E_sigma[log q_a - log q_b].

    All seeds share the exact samples, so their sampling error does not average out: it joins the error over seeds.
    """
    last, tsmc = study.run.generations, NAMES["tsmc"]

    def log_q(variant: str, seed: int, m: int) -> Tensor:
        return torch.tensor(found[f"{variant}-{seed}"]["rows"][m]["log_q"], dtype=torch.float64)  # [N]

    pairs = [(f"generation {a} to {b}", ("tsmc", a), ("tsmc", b)) for a, b in generation_steps(last)]
    pairs += [(f"{tsmc} to {NAMES[variant]}", ("tsmc", last), (variant, last)) for variant in VARIANTS[1:]]
    for name, (before, a), (after, b) in pairs:
        drops = torch.stack([log_q(before, seed, a) - log_q(after, seed, b) for seed in study.seeds])  # [S, N]
        for seed, drop in zip(study.seeds, drops, strict=True):
            numbers.add("changes", name, seed, "", "kl", drop.mean().item())
        shared = mean_estimate(drops.mean(0))
        numbers.add("changes", name, "mean", "", "kl", mean_of(drops.mean(1).tolist(), shared))


def write_numbers(numbers: Numbers, texts: list[dict], out: Path) -> None:
    """results.json and results.csv."""
    rows = [asdict(row) for row in numbers.rows.values()]
    write_json(out / "results.json", {"numbers": rows, "texts": texts})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "results.csv", text.getvalue())
