"""The study's commands, and the tables and figures that are made of its runs."""

import copy
import json
import sys
from pathlib import Path

import pytest
from jobs import refusal

from eval import report, study
from eval.config import read_config
from tinystories.checkpoint import write_json

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


def test_a_study_skips_what_is_finished_and_resumes_what_was_begun(tmp_path, monkeypatch, capsys):
    """main.py only writes down what it was told."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text(FAKE)
    runs = {"one": ("--length 5", (1, 2)), "two": ("--learner bad", (1,)), "three": ("", (1,))}
    monkeypatch.setattr(study, "RUNS", runs)

    def run_study(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["study", *map(str, arguments)])
        return refusal(command=lambda _: study.main())

    given = ("--out", "out", "--jobs", 1, "--only", "one", "two")
    assert "1 runs failed" in run_study(*given)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:2] == [f"--length 5 --seed {n} --out out/one-{n}" for n in (1, 2)]
    assert capsys.readouterr().out.splitlines()[1:] == ["out/one-2: done", "out/two-1: failed"]
    (tmp_path / "out/one-2/results.json").unlink()
    study.main()
    assert (tmp_path / "log").read_text().splitlines()[3:] == [
        f"--resume out/{name}" for name in ("one-2", "two-1")
    ]
    assert "invalid choice: 'four'" in run_study("--only", "four")


def test_an_interrupted_study_begins_no_further_run(tmp_path, monkeypatch):
    begun = []

    def interrupted(*given):
        begun.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(tmp_path), "--jobs", "1"])
    with pytest.raises(SystemExit) as ended:
        study.main()
    assert ended.value.code == 130 and len(begun) < 5


def test_every_command_of_the_study_is_understood():
    for options, seeds in study.RUNS.values():
        for seed in seeds:
            config = read_config([*options.split(), "--seed", str(seed)], "")[0]
            assert config.run.seed == seed


def make_study(folder: Path, run: Path, names: list[str]) -> None:
    """Copies of a run under these names. Of name n and seed s, counted from zero, generation m has
    toxicity .1 + .05 n + .01 s + .2 m, KL 4 - m, and ten seconds."""
    template = json.loads((run / "results.json").read_text())
    template["generations"].append(copy.deepcopy(template["generations"][1]))
    for number, name in enumerate(names):
        for place, seed in enumerate(study.RUNS[name][1]):
            results = copy.deepcopy(template)
            path = folder / f"{name}-{seed}"
            for m, row in enumerate(results["generations"]):
                row["toxicity"] = 0.1 + 0.05 * number + 0.01 * place + 0.2 * m
                row |= {"kl_target_proposal": 4.0 - m, "generation": m, "scores": 100 * m}
                write_json(path / f"generation-{m}" / "seconds.json", {"core_seconds": 10.0})
                (path / f"generation-{m}" / "metrics.jsonl").write_text('{"distinct": 7}\n')
            write_json(path / "results.json", results)


MARKED = "text\n<!-- table {} -->\nold\n<!-- end -->\nafter\n"


def test_the_tables_and_figures_of_a_study(tmp_path, finished_job):
    make_study(tmp_path / "study", finished_job("weighted"), list(study.RUNS))
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("".join(MARKED.format(name) for name in report.TABLES))
    report.main([str(tmp_path / "study"), str(page)])
    tables = json.loads((tmp_path / "docs/results/results.json").read_text())["tables"]
    for name, (rows, columns) in report.TABLES.items():
        assert list(tables[name]) == rows
        assert all(len(cells) == len(columns) for cells in tables[name].values())
    # Student's t with four degrees of freedom: 2.776 times .01581 / sqrt(5)
    assert tables["samples"]["weighted 1"][0] == "0.370 ± 0.020"
    assert tables["changes"]["paper 0 > paper 2"][0] == "0.400"
    assert tables["changes"]["weighted 2 > pooled 2"][0] == "0.050"
    assert tables["beside"]["pooled 2 > dpo-full 0"][::2] == ["-0.200", "2.00"]
    assert tables["record"]["pooled KL 3.0"] == ["5", "1.0", "100", "20"]
    assert tables["record"]["paper KL 2.0"] == ["5", "2.0", "200", "30"]
    assert tables["diagnostics"]["paper 1"][-1] == "7"
    filled = page.read_text()
    assert "| weighted 1 | 0.370 ± 0.020 |" in filled and "| paper 0 → paper 2 | 0.400 |" in filled
    assert filled.count("<!-- end -->\nafter\n") == len(report.TABLES)
    figures = {path.name for path in (tmp_path / "docs/results").glob("*.png")}
    assert figures == {"generations.png", "populations.png", "budgets.png", "beta.png"}
    report.main([str(tmp_path / "study"), str(page)])
    assert page.read_text() == filled
    page.write_text(MARKED.format("luck"))
    line = refusal(tmp_path / "study", page, command=report.main)
    assert "table luck: is not one of" in line and page.read_text() == MARKED.format("luck")


@pytest.mark.parametrize("names", [["weighted"], ["dpo-full", "pooled", "weighted"], ["pooled"]])
def test_a_part_of_a_study_has_its_tables(tmp_path, finished_job, names):
    make_study(tmp_path / "study", finished_job("weighted"), names)
    page = tmp_path / "page.md"
    page.write_text(MARKED.format("samples"))
    if "weighted" in names:
        report.main([str(tmp_path / "study"), str(page)])
        assert "| weighted 1 | " in page.read_text()
    else:
        line = refusal(tmp_path / "study", page, command=report.main)
        assert "study: holds no finished run weighted-SEED" in line
        assert page.read_text() == MARKED.format("samples")
