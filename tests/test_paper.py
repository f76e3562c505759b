"""The study at its tiny scale: its products, how it goes on, refusals, and its statistics."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
import torch

import main
import tinystories
from eval.metrics import energy_distance
from eval.paper import __main__ as paper
from eval.paper.cost import COSTS, baseline, baseline_cost, default_cost, size
from eval.paper.measure import energy_terms
from eval.paper.numbers import TARGET, Number, Numbers, Place, is_finished, read_rows
from eval.paper.parts import run_part
from eval.paper.report import FIGURES
from eval.paper.study import ABLATIONS, BASELINES, METHODS, WHEN, Part, Study, stages
from tinystories import Conditional, GPTNeo
from tinystories.errors import InputError
from tsmc.estimate import mean_estimate
from twist.adapter import Adapter
from twist.surrogate import ITERATIONS
from twist.value import ValueTwist

ROOT = Path(__file__).parents[1]
STUDY = paper.read_study(["--quick"])[0]
PRODUCTS = ("results.json",)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, worker_id) -> Path:
    """A finished study, made once for all workers; do not change it."""
    root = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        root = root.parent  # shared by the workers
    out = root / "paper-study"
    with filelock.FileLock(root / "paper-study.lock"), pytest.MonkeyPatch.context() as patch:
        if not (out / "report.html").exists():
            patch.setattr(main, "draw_figures", lambda *arguments: None)  # those of single runs
            for part in (part for stage in stages(STUDY) for part in stage):
                run_part(STUDY, part, out)
            paper.main(["--quick", "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def network() -> GPTNeo:
    """p^(0) of the preset."""
    return tinystories.load(STUDY.config().checkpoint("lm"))[0]


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of the finished study."""
    return shutil.copytree(whole, tmp_path / "study")


def numbers_of(out: Path) -> dict[tuple, dict]:
    """The rows of results.json by section, name, generation, seed and quantity."""
    rows = json.loads((out / "results.json").read_text())
    keys = ("section", "name", "generation", "seed", "quantity")
    return {tuple(row[key] for key in keys): row for row in rows}


def test_every_section_has_its_numbers(whole):
    rows = numbers_of(whole)
    for variant in METHODS | ABLATIONS:
        seeds = (1, 2, None) if variant in METHODS else (1, None)
        keys = {("generations", variant, m, seed, "kl") for m in (0, 1) for seed in seeds}
        assert keys == {key for key in rows if key[1] == variant and key[4] == "kl"}
    for method in STUDY.resampled():
        names = [f"{method}, {when}" for when in WHEN.values()]
        assert {("resampling", name, 1, None, "log_z_hat") for name in names} <= rows.keys()
    for method in BASELINES:
        assert {key[0] for key in rows if key[1].startswith(method)} == {"sweep", "best"}
    assert {"Base", "Best of 2", "Target"} == {key[1] for key in rows if key[0] == "rejection"}


def test_means_are_those_of_the_seeds_and_changes_are_paired(whole):
    rows = numbers_of(whole)
    for (section, name, m, seed, quantity), row in rows.items():
        each = [rows.get((section, name, m, one, quantity)) for one in (1, 2)]
        if seed is None and None not in each:
            assert row["value"] == pytest.approx(sum(one["value"] for one in each) / 2)
            assert row["seeds"] == 2 and row["low"] <= row["value"] <= row["high"]
    change = "published, generation 0 → published, generation 1"
    for seed in (1, 2):
        ends = [rows["generations", "published", m, seed, "toxicity"]["value"] for m in (0, 1)]
        found = rows["changes", change, None, seed, "toxicity"]["value"]
        assert found == pytest.approx(ends[1] - ends[0], abs=1e-12)


def test_variants_differ_where_their_ingredient_takes_part(whole):
    rows = numbers_of(whole)
    last = [rows["generations", name, 1, 1, "kl"]["value"] for name in METHODS | ABLATIONS]
    assert len(set(last)) == len(last)


def test_the_best_of_a_sweep_is_taken_over_on_the_first_seed_and_repeated_on_others(copied):
    rows = numbers_of(copied)
    best = {key: row for key, row in rows.items() if key[0] == "best" and key[3] == 1}
    assert len({key[1] for key in best}) == 4
    for (_, name, m, _, quantity), row in best.items():
        assert row["value"] == rows["sweep", name, m, None, quantity]["value"]
    run_part(STUDY, Part("best-of-dpo-full-2", "best", 2, "dpo-full"), copied)
    ((one,), (other,)) = (read_rows(copied, f"best-of-dpo-full-{seed}") for seed in (1, 2))
    assert one["place"] == other["place"] and one["updates"] == other["updates"]
    assert one["kl"] != other["kl"] and one.keys() == other.keys()


def test_means_are_over_the_seeds_that_ran_it_and_none_where_one_diverged():
    numbers = Numbers()
    for name, values in {"A": [0.1, 0.2, 0.9], "B": [0.3, 0.6], "C": [0.5]}.items():
        for seed, value in enumerate(values, 1):
            numbers.add(Place("best", name, seed=seed), {"distance": value})
    numbers.add(Place("best", "C", seed=2), {"updates": 3, "distance": None})  # diverged
    numbers.add(Place("best", "D", seed=1), {"distance": [0.5, 0.4, 0.7]})
    numbers.add_change(Place("best", "A"), Place("best", "B"), (1, 2, 3))
    numbers.add_means()
    means = {name: numbers.rows[Place("best", name)].get("distance") for name in "ABCD"}
    assert (means["A"].value, means["A"].seeds) == (pytest.approx(0.4), 3)
    assert (means["B"].value, means["B"].seeds) == (pytest.approx(0.45), 2)
    assert means["C"] is None and means["D"] == Number(0.5, 0.4, 0.7)
    change = numbers.rows[Place("changes", "A → B")]["distance"]
    assert (change.value, change.seeds) == (pytest.approx(0.3), 2)
    assert change.high - change.value == pytest.approx(12.706 * 0.1, rel=1e-3)  # Student, 1 dof


def test_an_error_that_all_seeds_share_is_added_once():
    """To a mean: that of the exact samples and of log Z. To a change: that of the exact samples."""
    source = torch.Generator().manual_seed(0)
    common = torch.randn(50, generator=source, dtype=torch.float64)
    moved = torch.randn(50, generator=source, dtype=torch.float64)
    numbers = Numbers()
    numbers.add(TARGET, {"log_z": [0.0, -0.6, 0.6]})
    values = {"A": [2.0, 2.1, 1.9, 2.0], "B": [1.0, 1.2, 1.0, 1.1]}
    for name, terms in (("A", common), ("B", common + moved)):
        row = {"terms": {"kl": terms.tolist()}}
        for seed, value in enumerate(values[name], 1):
            numbers.add(Place("best", name, seed=seed), row | {"kl": value})
    numbers.add_change(Place("best", "A"), Place("best", "B"), (1, 2, 3, 4))
    numbers.add_means()
    mean = numbers.rows[Place("best", "A")]["kl"]
    change = numbers.rows[Place("changes", "A → B")]["kl"]

    def half(values: list[float], *shared: float) -> float:
        estimate = mean_estimate(torch.tensor(values, dtype=torch.float64))
        return math.hypot(estimate.half_width(), *shared)

    exact = [mean_estimate(terms).half_width() for terms in (common, moved)]
    assert mean.high - mean.value == pytest.approx(half(values["A"], exact[0], 0.6))
    assert change.value == pytest.approx(-0.925)
    assert change.high - change.value == pytest.approx(half([-1.0, -0.9, -0.9, -0.9], exact[1]))


def test_the_terms_of_the_energy_distance_give_the_error_of_the_exact_samples():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=source) + 0.7
    energies, errors = [], []
    for _ in range(300):
        y = torch.randn(60, 5, generator=source)
        energies.append(energy_distance(x, y, torch.arange(200)))
        errors.append(mean_estimate(energy_terms(x, y)).std_error)
    assert sum(errors) / 300 == pytest.approx(torch.tensor(energies).std().item(), rel=0.12)


@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.3), (3, 0.02), (5, 0.1)])
def test_intervals_of_means_cover_errors_of_seeds_and_of_exact_samples(seeds, spread):
    """Percentiles of a bootstrap over three seeds and the samples would cover 88 % and fewer."""
    source, trials, covered = torch.Generator().manual_seed(1), 300, 0
    for _ in range(trials):
        numbers = Numbers()
        terms = 1.5 * torch.randn(1, 200, generator=source) + torch.randn(
            seeds, 200, generator=source
        )
        terms = terms + spread * torch.randn(seeds, 1, generator=source)
        for seed, own in enumerate(terms, 1):
            row = {"kl": own.mean().item(), "terms": {"kl": own.tolist()}}
            numbers.add(Place("changes", "A → B", seed=seed), row)
        numbers.add_means()
        mean = numbers.rows[Place("changes", "A → B")]["kl"]
        covered += mean.low <= 0 <= mean.high
    assert covered / trials >= 0.93


def test_the_report_is_complete_in_itself_and_shows_the_results(whole):
    report = (whole / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|\#)""", report) and "@import" not in report
    assert report.count("data:image/png;base64,") == len(FIGURES) == 3
    assert len(list((whole / "figures").glob("*.png"))) == 3
    known = set()
    for row in numbers_of(whole).values():
        values = [row[key] for key in ("value", "low", "high") if row[key] is not None]
        known |= {f"{value:.{digits}f}" for value in values for digits in (0, 1, 2, 3, 5)}
    shown = []
    for table in re.findall(r"<table>\n<thead>(.*?)</table>", report, re.DOTALL):
        lines = [re.findall(r"<t[hd]>", line) for line in table.split("<tr>")[1:]]
        assert len({len(line) for line in lines}) == 1, table
        shown += re.findall(r"(?<=[>\s])-?\d[\d.]*(?=[<\s])", re.sub(r"<th>.*?</th>", "", table))
    assert len(shown) > 500 and known.issuperset(shown)


def test_a_study_that_was_killed_goes_on_and_ends_the_same(whole, copied, capsys):
    """The worker ends with it, in the middle of its run. Finished parts are not repeated."""
    command = ["--quick", "--jobs", "1", "--out", str(copied)]
    run = copied / "runs" / "default-1"
    shutil.rmtree(run)
    (copied / "parts" / "default-1.json").unlink()
    for name in ("report.html", *PRODUCTS):
        (copied / name).unlink()
    study = subprocess.Popen([sys.executable, "-m", "eval.paper", *command], cwd=ROOT)
    while len(list(run.glob("resume/*.safetensors"))) < 4:
        assert study.poll() is None
        time.sleep(0.01)
    study.kill()
    study.wait()
    with filelock.FileLock(run / ".lock", timeout=60):
        assert not (run / "results.json").exists()
    paper.main(command)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed if " parts)" in line] == ["default-1"]
    for name in PRODUCTS:
        assert (copied / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_result_of_other_options_is_not_taken_over(copied, monkeypatch):
    part, options = Part("default-1", "run", 1), f"{STUDY.options} --value-batch-size 8"
    with pytest.raises(InputError, match="made with other options"):
        run_part(dataclasses.replace(STUDY, options=options), part, copied)
    monkeypatch.setitem(METHODS, "default", "--no-memory")
    with pytest.raises(InputError, match="made with other settings"):
        is_finished(STUDY, part, copied)


@pytest.mark.parametrize("option", ["--jobs 0", "--seeds 1", "--seeds 1 1", "--beta 1"])
def test_bad_options_and_a_study_of_other_options_are_refused(capsys, whole, option):
    with pytest.raises(SystemExit) as ended:
        paper.main(["--quick", "--out", str(whole), *option.split()])
    (line,) = capsys.readouterr().err.strip().splitlines()
    words = "made with other settings" if option == "--beta 1" else option.split()[0]
    assert ended.value.code == 2 and words in line


@pytest.mark.parametrize("method", BASELINES)
def test_baselines_spend_what_algorithm_1_spends(network, method):
    study = Study()
    budget = max(COSTS[name](study.config(name), network).units(20) for name in METHODS)
    for setting in range(len(study.grid(method))):
        config = baseline(study, method, setting, network)
        spent = baseline_cost(method, config).units(20)
        assert budget - spent / config.updates < spent <= budget


@pytest.mark.parametrize("method", METHODS)
def test_the_budget_is_what_algorithm_1_asks_of_the_language_model(
    monkeypatch, tmp_path, network, method
):
    study = dataclasses.replace(STUDY, options=f"{STUDY.options} --generations 2 --quiet")
    config = dataclasses.replace(study.config(method), out=str(tmp_path / "run"))
    asked = []
    decoder, states = Conditional.decoder, Conditional.states

    def counted_decoder(self, rows: int):
        asked.append(rows)
        return decoder(self, rows)

    def counted_states(self, tokens: torch.Tensor):
        asked.append((3 if torch.is_grad_enabled() else 1) * len(tokens))
        return states(self, tokens)

    monkeypatch.setattr(Conditional, "decoder", counted_decoder)
    monkeypatch.setattr(Conditional, "states", counted_states)
    monkeypatch.setattr(main, "evaluate_ends", lambda run, setup: {"generations": []})
    monkeypatch.setattr(main, "finish_generation", lambda *arguments: None)
    monkeypatch.setattr(main, "draw_figures", lambda *arguments: None)
    main.run_job(config, None)
    cost = COSTS[method](config, network).model
    if method == "published":
        assert sum(asked) == cost
    else:  # how many rows are drawn repeatedly is random
        assert 0.7 * cost < sum(asked) <= cost


def test_other_networks_count_with_their_parameters(network):
    config = Study().config()
    adapter = Adapter(network, torch.zeros(4096), True, 192, torch.Generator())
    value = ValueTwist(192, 64, 4096, torch.Generator(), torch.zeros(4096)).network
    none = dataclasses.replace(config, generations=0)
    spent = default_cost(none, network).others * size(network)
    adapted = size(adapter) + adapter.products.weight.numel()
    first, rounds, ladder = config.pool.first_draws, config.pool.first_rounds, 3 * 128
    ladder *= (rounds - 1) * config.pool.first_updates
    drawn = first * (rounds - 1) / rounds
    rows = (3 * 120 * 128 + 2000 + ladder + drawn) * adapted + 6 * 120 * 500 * size(value)
    pools = sum(first * (r + 1) // rounds for r in range(rounds))
    assert spent - rows == pytest.approx(3 * ITERATIONS * pools, rel=1e-3)
