"""The study at its tiny scale: its products, how it continues, refusals, and its statistics."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from jobs import run_main

from distill.finetune import Diverged
from eval import baseline, intervals, measure, report, study
from eval.measure import Task, energy_terms
from eval.metrics import energy_distance
from eval.parts import ABLATIONS, LEARNERS, Part, files
from tinystories.errors import InputError
from tsmc.estimate import mean_estimate

QUICK = ["--quick", "--jobs", "1", "--out"]
ROOT = Path(__file__).parents[1]
SMALL = study.read_study(["--quick"])[0]


@pytest.fixture(scope="session")
def whole(made_once) -> Path:
    """A finished study, made once for all workers; do not change it."""

    def make(out: Path) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the study's own processes: more threads round differently
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "run_main", lambda arguments: run_main(arguments) or 0.0)
            for part in (part for stage in study.stages(SMALL) for part in stage):
                study.run_part(SMALL, part, out)
            study.main([*QUICK, str(out)])
        torch.set_num_threads(threads)

    return made_once("study", make)


def read(out: Path) -> dict[tuple, dict]:
    """The rows of results.json by table, name and generation."""
    rows = json.loads((out / "results.json").read_text())["rows"]
    return {(row["table"], row["name"], row["generation"]): row for row in rows}


def part_named(name: str) -> Part:
    """The part of that name."""
    return next(part for stage in study.stages(SMALL) for part in stage if part.name == name)


def test_every_product_is_there(whole):
    rows = read(whole)
    for name in LEARNERS | ABLATIONS:
        for m in (0, 1):
            found = rows["samples", name, m]
            assert {"toxicity", "similarity", "energy", "kl"} <= found["numbers"].keys()
            assert found["seeds"] == ([1, 2] if name in LEARNERS else [1])
        found = rows["cost", name, 1]["numbers"].keys()
        assert {"scores", "exact_texts"} <= found and ("gain" in found) == (
            name != "no-effective-potential"
        )
    for name in LEARNERS:
        assert rows["populations", name, 1]["numbers"].keys() == {"K = 2", "K = 4"}
    for method in baseline.METHODS:
        assert rows["samples", method, None]["seeds"] == [1]
        assert rows["settings", method, None]["seeds"] == [SMALL.sweep_seed]
    betas = [row for key, row in rows.items() if key[0] == "beta"]
    assert [row["name"] for row in betas] == ["0", "1", "0.3"]
    for row in betas:
        assert sum(row["histogram"]) == pytest.approx(1) and 1 <= len(row["texts"]) <= 3
    assert {"Base", "Best of 2", "Target"} <= {key[1] for key in rows}
    assert len(list((whole / "figures").glob("*.png"))) == 4
    assert (whole / "results.json").stat().st_size < 300_000


def test_means_are_those_of_the_seeds_and_changes_are_paired(whole):
    rows = read(whole)
    each = {name: [] for name in LEARNERS}
    for name in LEARNERS:
        for seed in (1, 2):
            result = json.loads(files(SMALL, part_named(f"{name}-{seed}"), whole)[0].read_text())
            each[name] += [row for row in result["rows"][-1:] if row["table"] == "samples"]
    for name in LEARNERS:
        for quantity in ("toxicity", "kl", "log_z_hat_mean"):
            mean, low, high = rows["samples", name, 1]["numbers"][quantity]
            expected = sum(row[quantity] for row in each[name]) / 2
            assert mean == pytest.approx(expected, rel=1e-5) and low <= mean <= high
    pairs = zip(each["default"], each["pooled"], strict=True)
    changes = [after["kl"] - before["kl"] for before, after in pairs]
    found = rows["changes", "default, generation 1 → pooled, generation 1", None]["numbers"]["kl"]
    assert found[0] == pytest.approx(sum(changes) / 2, rel=1e-5)
    before = rows["populations", "pooled", 0]["numbers"]["K = 4"][0]
    after = rows["populations", "pooled", 1]["numbers"]["K = 2"][0]
    found = rows["changes", "pooled, K = 4, generation 0 → K = 2, generation 1", None]["numbers"]
    assert found["toxicity"][0] == pytest.approx(after - before, abs=1e-5)


def test_a_study_continues_and_ends_the_same_but_for_seconds(tmp_path, capsys, whole):
    """A run that was killed before it had written anything begins anew; the others are kept."""
    copied = shutil.copytree(whole, tmp_path / "study")
    part = part_named("pooled-2")
    file, run = files(SMALL, part, copied)
    file.unlink()
    shutil.rmtree(run)
    run.mkdir()
    study.main([*QUICK, str(copied)])
    printed = capsys.readouterr().out
    assert re.findall(r"^(.*) is done", printed, re.MULTILINE) == ["pooled-2"]
    before, after = read(whole), read(copied)
    for row in [*before.values(), *after.values()]:
        row["numbers"].pop("seconds", None)
    assert before == after and "<!-- table words -->" in printed


def test_what_was_made_otherwise_is_not_taken_over(tmp_path):
    """By other options, another version, or a potential whose file has changed."""
    own = tmp_path / "own.py"
    own.write_text("def phi(texts):\n    return [0.0 for _ in texts]\n")
    options = ["--quick", "--potential", f"{own}:phi"]
    studies = [study.read_study(arguments)[0] for arguments in (["--quick"], options)]
    own.write_text(own.read_text() + "\n")
    studies.append(study.read_study(options)[0])
    studies.append(study.replace(SMALL, made_by="another version"))
    found = [files(one, part_named("default-1"), tmp_path) for one in studies]
    assert len({file for file, _ in found}) == 4
    assert len({run for _, run in found}) == 4
    names = [part.name for stage in study.chosen(SMALL, ["dpo-full"]) for part in stage]
    assert names == ["target", "sweep-dpo-full", "dpo-full-1"]
    again = study.read_study(["--quick", "--seeds", "1", "2", "3"])[0]
    assert files(again, part_named("default-1"), tmp_path) == found[0]


def test_only_divergence_is_recorded_as_divergence(whole, monkeypatch):
    def fail(*arguments):
        raise error

    task = Task(SMALL, part_named("dpo-full-1"), whole)
    monkeypatch.setattr(measure, "dpo", fail)
    error = Diverged("the trained model is not finite")
    assert measure.measure_baseline(task)["rows"][0]["diverged"] == str(error)
    assert not set(measure.measure_sweep(task)["rows"][0]) & {"energy", "kl"}
    error = InputError("own.py: the server is down")
    with pytest.raises(InputError, match="the server is down"):
        measure.measure_baseline(task)
    with pytest.raises(InputError, match=r"^main.py has failed"):
        measure.run_main(["--no-such-option"])


@pytest.mark.parametrize("option", ["--jobs 0", "--seeds 1", "--seeds 1 1", "--seeds 1 70", "--no"])
def test_bad_options_end_in_one_line(capsys, tmp_path, option):
    with pytest.raises(SystemExit) as ended:
        study.main([*QUICK, str(tmp_path / "out"), *option.split()])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and option.split()[0] in line


@pytest.mark.parametrize(("best", "inside"), [((1, 0), True), ((-1, 2), True), ((9, 0), False)])
def test_a_sweep_goes_on_until_the_best_lies_inside(best, inside):
    tried = []

    def energy(setting):
        tried.append(setting)
        if setting == (2, -1):
            return math.inf  # diverged
        return sum((a - b) ** 2 for a, b in zip(setting, best, strict=True))

    found, is_inside = baseline.search(energy, baseline.FIRST, widenings=5)
    assert is_inside == inside and len(tried) == len(set(tried)) <= 9 + 5 * 4
    assert found == (best if inside else (7, 0))
    assert baseline.search(lambda _: math.inf, baseline.FIRST, 5)[1] is False


def test_intervals_stay_in_the_possible_range():
    for values in ([0.9, 0.99, 0.8], [0.001, 0.3, 0.1]):
        values = torch.tensor(values, dtype=torch.float64)
        for kind in ("share", "positive"):
            mean, low, high = intervals.interval(values, 0.05, kind)
            assert 0 < low < mean < high and (kind == "positive" or high < 1)
    mean, low, high = intervals.interval(
        torch.tensor([0.01, -0.02, 0.02]).double(), 0.0, "positive"
    )
    assert low == 0 < mean < high


def test_an_error_that_all_seeds_share_is_added_once():
    """To a mean: that of the exact samples and of log Z. To a change: that of the exact samples."""
    source = torch.Generator().manual_seed(0)
    common, moved = torch.randn(2, 50, generator=source, dtype=torch.float64)
    values = {"A": [2.0, 2.1, 1.9, 2.0], "B": [1.0, 1.2, 1.0, 1.1]}
    terms = {"A": {"kl": common.tolist()}, "B": {"kl": (common + moved).tolist()}}
    seeds = {
        name: {seed: {"kl": kl, "terms": terms[name]} for seed, kl in enumerate(values[name])}
        for name in values
    }
    change = [*intervals.change(seeds["A"], seeds["B"]).values()]

    def half(values: list[float], *shared: float) -> float:
        estimate = mean_estimate(torch.tensor(values, dtype=torch.float64))
        return math.hypot(estimate.half_width(), *shared)

    exact = [mean_estimate(term).half_width() for term in (common, moved)]
    mean = intervals.shared_error(("samples", "A", 0), "kl", [*seeds["A"].values()], 0.6)
    assert mean == pytest.approx(math.hypot(exact[0], 0.6))
    found = intervals.numbers_of(("changes", "", None), change, 0.6)["kl"]
    assert found[0] == pytest.approx(-0.925)
    assert found[2] - found[0] == pytest.approx(half([-1.0, -0.9, -0.9, -0.9], exact[1]), rel=1e-4)


def test_the_terms_of_the_energy_distance_give_the_error_of_the_exact_samples():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=source) + 0.7
    energies, errors = [], []
    for _ in range(300):
        y = torch.randn(60, 5, generator=source)
        energies.append(energy_distance(x, y, torch.arange(200)))
        errors.append(mean_estimate(energy_terms(x, y)).std_error)
    assert sum(errors) / 300 == pytest.approx(torch.tensor(energies).std().item(), rel=0.12)


def test_a_word_differs_beyond_its_noise_on_either_side():
    for low, expected in ((0.55, True), (0.4, False), (0.2, True)):
        assert intervals.differs([low, low + 0.01, low + 0.02], 0.41, 530, 0.005) == expected
    assert not intervals.differs([0.5, 0.7, 0.3], 0.41, 530, 0.005), "seeds that disagree"


def test_the_page_shows_the_results_that_are_committed():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "docs" / "results" / "results.json").read_text())
    assert "<!-- table" in page and report.fill(page, results) == page
