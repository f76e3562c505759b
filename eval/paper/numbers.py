"""All numbers of a study in one table, of which the report and the result files are made.

    mean over seeds with its 95 % interval (Student's t); the seeds are the independent units
    changes are computed within each seed before they are averaged

KL(sigma||q) of all seeds is estimated from the same exact samples of sigma. Their error does not
average out over seeds, so it is added to the interval of a mean; for a change it is the error of
the mean of log q_before - log q_after. N exact samples, S seeds.
"""

import csv
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eval.paper.study import ON_ALL_SEEDS, VARIANTS, WITH_PARTICLES, Study, stages
from tinystories.checkpoint import read_json, write_text
from tsmc.estimate import mean_estimate

NO_NUMBERS = ("place", "kl_terms", "histogram", "texts")  # what else the row of a part holds


class Place(NamedTuple):
    """Where a number belongs; `seed` is None for means and for what only one seed has."""

    section: str
    name: str
    generation: int | None = None
    seed: int | None = None

    @property
    def label(self) -> str:
        """Name and generation."""
        return self.name + ("" if self.generation is None else f", generation {self.generation}")


class Number(NamedTuple):
    """A value, its 95 % interval if it has one, and how many seeds it is a mean of."""

    value: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1


TARGET = Place("rejection", "Target")


class Numbers:
    """The table: for every place its numbers by quantity."""

    def __init__(self):
        self.rows: dict[Place, dict[str, Number]] = {}
        self.kl_terms: dict[Place, Tensor] = {}  # [N] log p^(0) phi - log q of the exact samples
        self.histograms: dict[str, list[int]] = {}  # of toxicity
        self.texts: list[dict] = []

    def add(self, place: Place, row: dict) -> None:
        """The row of a part."""
        self.rows[place] = {}
        for name, value in row.items():
            values = value if isinstance(value, list) else [value]
            if name not in NO_NUMBERS and values[0] is not None:
                self.rows[place][name] = Number(*values)
        if "kl" in self.rows[place]:
            self.kl_terms[place] = torch.tensor(row["kl_terms"], dtype=torch.float64)
        if "histogram" in row:
            self.histograms[place.name] = row["histogram"]

    def add_change(self, before: Place, after: Place, seeds: tuple[int, ...]) -> None:
        """Section "changes": after - before within every seed that has both."""
        for seed in seeds:
            place = Place("changes", f"{before.label} → {after.label}", seed=seed)
            one, other = before._replace(seed=seed), after._replace(seed=seed)
            if one not in self.rows or other not in self.rows:
                continue
            old = self.rows[one]
            new = self.rows[other]
            names = [name for name in old if name in new]
            self.rows[place] = {name: Number(new[name].value - old[name].value) for name in names}
            if "kl" in names:
                self.kl_terms[place] = self.kl_terms[other] - self.kl_terms[one]

    def add_means(self) -> None:
        """The mean over seeds of everything that all seeds of a place have."""
        groups: dict[Place, list[Place]] = {}
        for place in self.rows:
            if place.seed is not None:
                groups.setdefault(place._replace(seed=None), []).append(place)
        for mean, places in groups.items():
            rows = [self.rows[place] for place in places]
            names = [name for name in rows[0] if all(name in row for row in rows)]
            self.rows[mean] = {name: self.mean(places, name) for name in names}

    def mean(self, places: list[Place], quantity: str) -> Number:
        """The mean of a quantity over seeds; of one seed its own number."""
        numbers = [self.rows[place][quantity] for place in places]
        if len(numbers) == 1:
            return numbers[0]
        shared = []  # half-widths of errors that all seeds have in common
        if quantity == "kl":
            terms = torch.stack([self.kl_terms[place] for place in places])  # [S, N]
            shared.append(mean_estimate(terms.mean(0)).half_width())
            if places[0].section != "changes":
                log_z = self.rows[TARGET]["log_z"]
                shared.append((log_z.high - log_z.low) / 2)
        values = torch.tensor([number.value for number in numbers], dtype=torch.float64)  # [S]
        estimate = mean_estimate(values)
        half = math.hypot(estimate.half_width(), *shared)
        return Number(estimate.value, estimate.value - half, estimate.value + half, len(numbers))

    def table(self, *sections: str) -> list[tuple[Place, dict[str, Number]]]:
        """The rows of some sections in their order, means only."""
        means = [(place, row) for place, row in self.rows.items() if place.seed is None]
        return [pair for section in sections for pair in means if pair[0].section == section]


def read_rows(out: Path, name: str) -> list[dict]:
    """The rows of a finished part."""
    return read_json(out / "parts" / f"{name}.json")["rows"]


def collect(study: Study, out: Path) -> Numbers:
    """All numbers of a study whose parts are finished, and the texts of the first seed."""
    numbers = Numbers()
    for part in (part for stage in stages(study) for part in stage):
        for row in read_rows(out, part.name):
            seed = part.seed if part.kind in ("run", "best") else None
            place = Place(*row["place"], seed)
            numbers.add(place, row)
            if "texts" in row and part.seed == study.seeds[0] and part.kind != "sweep":
                numbers.texts.append({"set": place.label, "texts": row["texts"]})
    best = dict.fromkeys(place.name for place in numbers.rows if place.section == "best")
    for before, after in comparisons(study, best):
        numbers.add_change(before, after, study.seeds)
    numbers.add_means()
    return numbers


def comparisons(study: Study, best: Iterable[str]) -> list[tuple[Place, Place]]:
    """Before and after of every change; `best` are the best settings of the baselines."""
    last = study.config().generations
    few, many = min(study.particle_counts), max(study.particle_counts)
    steps = [(m, m + 1) for m in range(last)] + ([(0, last)] if last > 1 else [])
    pairs = [("published", other) for other in VARIANTS if other != "published"]

    def generation(variant: str, m: int = last) -> Place:
        return Place("generations", variant, m)

    found = [(generation(one, a), generation(one, b)) for one in VARIANTS for a, b in steps]
    found += [(generation(a), generation(b)) for a, b in [*pairs, ("default", "pooled")]]
    for name in WITH_PARTICLES:
        after = Place("particles", f"{name}, K = {few}", last)
        found.append((Place("particles", f"{name}, K = {many}", 0), after))
    for scheme in ("multinomial, every step", "multinomial, at the end only"):
        found.append((Place("resampling", scheme, 0), Place("resampling", scheme, last)))
    return found + [(generation(a), Place("best", name)) for name in best for a in ON_ALL_SEEDS]


def write_results(numbers: Numbers, out: Path) -> None:
    """results.json, with one number a line, and results.csv."""
    rows = [
        place._asdict() | {"quantity": quantity} | number._asdict()
        for place, row in numbers.rows.items()
        for quantity, number in row.items()
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(out / "results.json", f"[\n{lines}\n]\n")
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "results.csv", table.getvalue())
