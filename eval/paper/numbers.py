"""All numbers of a study in one table, of which the report and the result files are made.

    mean over seeds with its 95 % interval (Student's t); the seeds are the independent units
    changes are computed within each seed before they are averaged

All seeds share the M exact samples of sigma, and their error does not average out over seeds. It is
that of the mean of their `terms` (`eval/paper/measure.py`), of a change that of the difference of
the terms, and is added in quadrature, to a mean KL also the error of log Z_sigma. S seeds.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eval.paper.study import ABLATIONS, BASELINES, METHODS, WHEN, Part, Study, stages
from tinystories.checkpoint import read_json, write_json
from tinystories.errors import InputError
from tsmc.estimate import mean_estimate


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
        self.terms: dict[Place, dict[str, Tensor]] = {}  # [M] by quantity

    def add(self, place: Place, row: dict) -> None:
        """The row of a part, or of a change."""
        self.rows[place] = {}
        for name, value in row.items():
            values = value if isinstance(value, list) else [value]
            if name not in ("place", "terms") and values[0] is not None:
                self.rows[place][name] = Number(*values)
        self.terms[place] = {
            name: torch.as_tensor(terms, dtype=torch.float64)
            for name, terms in row.get("terms", {}).items()
        }

    def add_change(self, before: Place, after: Place, seeds: tuple[int, ...]) -> None:
        """after - before within every seed that has both."""
        section = "thresholds" if before.section == "resampling" else "changes"
        for seed in seeds:
            one, other = before._replace(seed=seed), after._replace(seed=seed)
            if one in self.rows and other in self.rows:
                place = Place(section, f"{before.label} → {after.label}", seed=seed)
                old, new = self.rows[one], self.rows[other]
                row = {name: new[name].value - old[name].value for name in old if name in new}
                terms = self.terms[other].items()
                moved = {name: term - self.terms[one][name] for name, term in terms if name in row}
                self.add(place, row | {"terms": moved})

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
        if quantity in self.terms[places[0]]:
            terms = torch.stack([self.terms[place][quantity] for place in places])  # [S, M]
            shared.append(mean_estimate(terms.mean(0)).half_width())
        if quantity == "kl" and places[0].section != "changes":
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


def description(study: Study, part: Part) -> str:
    """What the result of a part depends on; the seeds of other parts are left out."""
    grid = study.grid(part.method) if part.method in BASELINES else []
    config = study.config(part.method, part.seed)
    return repr((replace(study, seeds=(), few=0), part, grid, config))


def is_finished(study: Study, part: Part, out: Path) -> bool:
    """Whether a part has its result; InputError where it was made with other settings."""
    path = out / "parts" / f"{part.name}.json"
    if not path.exists():
        return False
    if read_json(path).get("description") != description(study, part):
        raise InputError(f"{path}: made with other settings; choose another --out, or delete it")
    return True


def read_rows(out: Path, name: str) -> list[dict]:
    """The rows of a finished part."""
    return read_json(out / "parts" / f"{name}.json")["rows"]


def collect(study: Study, out: Path) -> Numbers:
    """All numbers of the finished parts of a study."""
    numbers = Numbers()
    for part in itertools.chain(*stages(study)):
        for row in read_rows(out, part.name) if is_finished(study, part, out) else []:
            place = Place(*row["place"], part.seed if part.kind in ("run", "best") else None)
            numbers.add(place, row)
    for before, after in comparisons(study, numbers):
        numbers.add_change(before, after, study.seeds)
    numbers.add_means()
    return numbers


def comparisons(study: Study, numbers: Numbers) -> list[tuple[Place, Place]]:
    """Before and after of every change."""
    last = study.config().generations
    found = []
    for variant in METHODS | ABLATIONS:
        generations = [Place("generations", variant, m) for m in range(last + 1)]
        found += itertools.pairwise(generations)
        if last > 1:
            found.append((generations[0], generations[last]))
    end = {variant: Place("generations", variant, last) for variant in METHODS | ABLATIONS}
    found.append((end["published"], end["default"]))
    for variant in ABLATIONS:
        whole = "published" if variant.startswith("published") else "default"
        found.append((end[whole], end[variant]))
    never, *others = WHEN.values()
    for method in study.resampled():
        before = Place("resampling", f"{method}, {never}", last)
        found += [(before, before._replace(name=f"{method}, {when}")) for when in others]
    best = [place._replace(seed=None) for place in numbers.rows if place.section == "best"]
    return found + [(end[method], place) for place in dict.fromkeys(best) for method in METHODS]


def write_results(numbers: Numbers, out: Path) -> None:
    """results.json, a row for each number."""
    rows = [
        place._asdict() | {"quantity": quantity} | number._asdict()
        for place, row in numbers.rows.items()
        for quantity, number in row.items()
    ]
    write_json(out / "results.json", rows)
