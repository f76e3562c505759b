"""The study's commands, intervals over seeds, and the tables and figures that are made of them."""

import copy
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from jobs import refusal

from eval import intervals, report, study
from eval.config import read_config
from eval.metrics import energy_distance, energy_terms
from tinystories.checkpoint import write_json
from tsmc.estimate import mean_estimate

FAKE = """import json, pathlib, sys
arguments = sys.argv[1:]
with open("log", "a") as log:
    print(*arguments, file=log)
name = "--resume" if "--resume" in arguments else "--out"
path = pathlib.Path(arguments[arguments.index(name) + 1])
path.mkdir(exist_ok=True, parents=True)
(path / "config.json").write_text("{}")
if "bad" in arguments:
    sys.exit(2)
(path / "results.json").write_text("{}")
"""


def run_study(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["study", *map(str, arguments)])
    study.main()


def test_a_study_skips_what_is_finished_and_resumes_what_was_begun(tmp_path, monkeypatch, capsys):
    """main.py only writes down what it was told."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text(FAKE)
    runs = {"one": ("--length 5", (1, 2)), "two": ("--learner bad", (1,)), "three": ("", (1,))}
    monkeypatch.setattr(study, "RUNS", runs)
    given = ("--out", "out", "--jobs", 1, "--only", "one", "two", "--options", "--eval-runs 3")
    run_study(monkeypatch, *given)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:2] == [f"--length 5 --eval-runs 3 --seed {n} --out out/one-{n}" for n in (1, 2)]
    assert capsys.readouterr().out.splitlines()[1:] == ["out/one-2: done", "out/two-1: failed"]
    assert json.loads((tmp_path / "out/one-1/seconds.json").read_text())["seconds"] > 0
    (tmp_path / "out/one-2/results.json").unlink()
    run_study(monkeypatch, *given)
    assert (tmp_path / "log").read_text().splitlines()[3:] == [
        f"--resume out/{name}" for name in ("one-2", "two-1")
    ]
    assert not (tmp_path / "out/two-1/seconds.json").exists()
    assert "--jobs is 0" in refusal(command=lambda _: run_study(monkeypatch, "--jobs", 0))


def test_an_interrupted_study_begins_no_further_run(tmp_path, monkeypatch):
    begun = []

    def interrupted(*given):
        begun.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        run_study(monkeypatch, "--out", tmp_path, "--jobs", 1)
    assert ended.value.code == 130 and len(begun) < 5


def test_every_command_of_the_study_is_understood():
    for options, seeds in study.RUNS.values():
        for seed in seeds:
            config = read_config([*options.split(), "--seed", str(seed)], "")[0]
            assert config.run.seed == seed


def test_intervals_stay_in_the_possible_range():
    for values in ([0.9, 0.99, 0.8], [0.001, 0.3, 0.1]):
        values = torch.tensor(values, dtype=torch.float64)
        for kind in ("share", "positive"):
            mean, low, high = intervals.interval(values, 0.05, kind)
            assert 0 < low < mean < high and (kind == "positive" or high < 1)
    values = torch.tensor([0.01, -0.02, 0.02], dtype=torch.float64)
    mean, low, high = intervals.interval(values, 0.0, "positive")
    assert low == 0 < mean < high
    mean, low, high = intervals.interval(values, 0.0, "any")
    assert high - mean == pytest.approx(mean_estimate(values).half_width())
    assert low == pytest.approx(2 * mean - high)


def test_an_error_that_all_seeds_share_is_added_once():
    """To a mean: that of the exact samples and of log Z. To a change: that of the exact samples."""
    source = torch.Generator().manual_seed(0)
    common, moved = torch.randn(2, 50, generator=source, dtype=torch.float64)
    values = {"A": [2.0, 2.1, 1.9, 2.0], "B": [1.0, 1.2, 1.0, 1.1]}
    terms = {"A": common.tolist(), "B": (common + moved).tolist()}
    seeds = {}
    for name in values:
        rows = [{"kl_target_proposal": kl, "terms_kl": terms[name]} for kl in values[name]]
        seeds[name] = dict(enumerate(rows))
    exact = [mean_estimate(term).half_width() for term in (common, moved)]
    mean = intervals.shared_error("kl_target_proposal", [*seeds["A"].values()], 0.6)
    assert mean == pytest.approx(math.hypot(exact[0], 0.6))
    change = intervals.change(seeds["A"], seeds["B"] | {9: {}}, ("kl_target_proposal",))
    found = intervals.numbers_of(change, 0.6, True)["kl_target_proposal"]
    assert found[0] == pytest.approx(-0.925)
    of_seeds = mean_estimate(torch.tensor([-1.0, -0.9, -0.9, -0.9])).half_width()
    assert found[2] - found[0] == pytest.approx(math.hypot(of_seeds, exact[1]), rel=1e-4)
    (alone,) = intervals.numbers_of({0: seeds["A"][0]}, 0.6)["kl_target_proposal"]
    assert alone == 2.0


def test_the_terms_of_the_energy_distance_give_the_error_of_the_exact_samples():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=source) + 0.7
    energies, errors = [], []
    for _ in range(300):
        y = torch.randn(60, 5, generator=source)
        energies.append(energy_distance(x, y, torch.arange(200)))
        errors.append(mean_estimate(energy_terms(x, y)).std_error)
    assert sum(errors) / 300 == pytest.approx(torch.tensor(energies).std().item(), rel=0.12)


@pytest.fixture(scope="module")
def template(finished_job) -> tuple[dict, dict]:
    """Options and results of a run."""
    run = finished_job("weighted")
    return tuple(json.loads((run / f"{name}.json").read_text()) for name in ("config", "results"))


def make_study(folder: Path, template: tuple[dict, dict], names: list[str]) -> None:
    """Runs of these names; of name n and seed s toxicity is .1 + .05 n + .01 s in the last rows."""
    for number, name in enumerate(names):
        for place, seed in enumerate(study.RUNS[name][1]):
            config, results = copy.deepcopy(template)
            if name.startswith(("dpo", "grpo", "sweep")):
                config |= {"learning_rate": 0.001, "strength": 0.4}
                results["generations"] = results["generations"][:1]
            results["generations"][-1]["toxicity"] = 0.1 + 0.05 * number + 0.01 * place
            run = folder / f"{name}-{seed}"
            write_json(run / "config.json", config)
            write_json(run / "results.json", results)
            write_json(run / "seconds.json", {"seconds": 100.0 + place})


MARKED = "text\n<!-- table {} -->\nold\n<!-- end -->\nafter\n"


def test_the_tables_and_figures_of_a_study(tmp_path, template):
    names = [name for name in study.RUNS if not name.startswith("sweep")]
    make_study(tmp_path / "study", template, [*names, "sweep-dpo-full-0.001-0.4"])
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    tables = [*report.COLUMNS, "populations"]
    page.write_text("".join(MARKED.format(name) for name in tables))
    report.main([str(tmp_path / "study"), str(page)])
    results = json.loads((tmp_path / "docs/results/results.json").read_text())
    assert {*tables} == results["tables"].keys() and all(results["tables"].values())
    found = results["tables"]
    mean, low, high = found["samples"]["weighted, generation 1"]["toxicity"]
    values = torch.tensor([0.15, 0.16, 0.17, 0.18, 0.19], dtype=torch.float64)
    assert [mean, low, high] == pytest.approx(intervals.interval(values, 0.0, "share"), rel=1e-5)
    assert found["changes"]["weighted → pooled"]["toxicity"] == pytest.approx([0.05] * 3)
    assert found["ingredients"]["weighted → lora"]["toxicity"] == pytest.approx([0.1] * 3)
    assert found["beside"]["pooled → dpo-full"]["toxicity"] == pytest.approx([0.2] * 3)
    first = template[1]["generations"][0]["toxicity"]
    moved = found["changes"]["paper, generation 0 → 1"]["toxicity"]
    assert moved[0] == pytest.approx(0.12 - first, rel=1e-4)
    assert found["cost"]["dpo-full"]["seconds"][0] == 101 and "sweep" not in str(found["cost"])
    row = template[1]["generations"][0]["populations"]
    assert found["populations"]["paper, generation 0"]["K = 2"][0] == pytest.approx(row["2"])
    assert found["settings"]["sweep-dpo-full-0.001-0.4"]["strength"] == [0.4]
    assert found["beta"].keys() == {"0", "1", "10"}
    filled = page.read_text()
    assert f"| weighted, generation 1 | {mean:.3f} ({low:.3f} to {high:.3f}) |" in filled
    assert filled.count("text\n<!-- table") == len(tables) == filled.count("<!-- end -->\nafter\n")
    figures = {path.name for path in (tmp_path / "docs/results").glob("*.png")}
    assert figures == {"generations.png", "populations.png", "beta.png"}
    report.main([str(tmp_path / "study"), str(page)])
    assert page.read_text() == filled
    page.write_text(MARKED.format("luck"))
    line = refusal(tmp_path / "study", page, command=report.main)
    assert "table luck: there is none" in line and page.read_text() == MARKED.format("luck")


@pytest.mark.parametrize("names", [["weighted"], ["dpo-full", "pooled", "weighted"]])
def test_a_part_of_a_study_has_its_tables(tmp_path, template, names):
    make_study(tmp_path / "study", template, names)
    page = tmp_path / "page.md"
    page.write_text(MARKED.format("samples"))
    report.main([str(tmp_path / "study"), str(page)])
    assert "| weighted, generation 1 | " in page.read_text()


@pytest.mark.parametrize("names", [[], ["pooled"]])
def test_a_study_without_the_default_learner_is_refused(tmp_path, template, names):
    (tmp_path / "study").mkdir()
    make_study(tmp_path / "study", template, names)
    line = refusal(tmp_path / "study", tmp_path / "page.md", command=report.main)
    assert "study: holds no finished run" in line and not (tmp_path / "results").exists()
