"""All numbers of a study in one table, of which the report and the result files are made.

    mean over seeds with its 95 % interval (Student's t); the seeds are the independent units
    changes are computed within each seed before they are averaged

KL(sigma||q) of all seeds is estimated from the same exact samples of sigma. Their error does not
average out over seeds, so it is added to the interval of a mean; for a change it is the error of
the mean of log q_before - log q_after. N exact samples, S seeds.
"""

import csv
import io
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eval.paper.study import METHODS, VARIANTS, Study, stages
from tinystories.checkpoint import read_json, write_json, write_text
from tsmc.estimate import mean_estimate

NO_NUMBERS = ("place", "kl_terms", "histogram", "texts")  # what else the row of a part holds
WITH_TEXTS = ("rejection", "generations", "best")  # sections whose texts the report shows


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
        self.texts: dict[str, list] = {}  # a few of each set

    def add(self, place: Place, row: dict) -> None:
        """The row of a part, or of a change."""
        self.rows[place] = {}
        for name, value in row.items():
            values = value if isinstance(value, list) else [value]
            if name not in NO_NUMBERS and values[0] is not None:
                self.rows[place][name] = Number(*values)
        if "kl" in self.rows[place]:
            self.kl_terms[place] = torch.as_tensor(row["kl_terms"], dtype=torch.float64)
        if "histogram" in row:
            self.histograms[place.name] = row["histogram"]

    def add_change(self, before: Place, after: Place, seeds: tuple[int, ...]) -> None:
        """Section "changes": after - before within every seed that has both."""
        for seed in seeds:
            one, other = before._replace(seed=seed), after._replace(seed=seed)
            if one in self.rows and other in self.rows:
                place = Place("changes", f"{before.label} → {after.label}", seed=seed)
                old, new = self.rows[one], self.rows[other]
                row = {name: new[name].value - old[name].value for name in old if name in new}
                if "kl" in row:
                    row["kl_terms"] = self.kl_terms[other] - self.kl_terms[one]
                self.add(place, row)

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
        values = [number.value for number in numbers]
        estimate = mean_estimate(torch.tensor(values, dtype=torch.float64))
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
    for part in itertools.chain(*stages(study)):
        for row in read_rows(out, part.name):
            place = Place(*row["place"], part.seed if part.kind in ("run", "best") else None)
            numbers.add(place, row)
            if place.section in WITH_TEXTS and part.seed == study.seeds[0] and "texts" in row:
                numbers.texts[place.label] = row["texts"]
    for before, after in comparisons(study, numbers):
        numbers.add_change(before, after, study.seeds)
    numbers.add_means()
    return numbers


def comparisons(study: Study, numbers: Numbers) -> list[tuple[Place, Place]]:
    """Before and after of every change."""
    last = study.config().generations
    few, many = min(study.particle_counts), max(study.particle_counts)
    found = []
    for variant in VARIANTS:
        generations = [Place("generations", variant, m) for m in range(last + 1)]
        found += itertools.pairwise(generations)
        if last > 1:
            found.append((generations[0], generations[last]))
    end = {variant: Place("generations", variant, last) for variant in VARIANTS}
    found += [(end["published"], end[other]) for other in VARIANTS if other != "published"]
    for method in METHODS:
        after = Place("particles", f"{method}, K = {few}", last)
        found.append((Place("particles", f"{method}, K = {many}", 0), after))
    for scheme in ("multinomial, every step", "multinomial, at the end only"):
        found.append((Place("resampling", scheme, 0), Place("resampling", scheme, last)))
    best = [place._replace(seed=None) for place in numbers.rows if place.section == "best"]
    return found + [(end[method], place) for place in dict.fromkeys(best) for method in METHODS]


def write_results(numbers: Numbers, out: Path) -> None:
    """results.json and results.csv, a row for each number."""
    rows = [
        place._asdict() | {"quantity": quantity} | number._asdict()
        for place, row in numbers.rows.items()
        for quantity, number in row.items()
    ]
    write_json(out / "results.json", rows)
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "results.csv", table.getvalue())
