"""Runs side by side: compared with others and any method's texts, and the runs of the study."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from jobs import refusal

from eval import compare, report, study
from eval.config import read_config, saved_config
from eval.sample import TrainedRun
from eval.table import read_results
from eval.world import load_world
from tinystories.checkpoint import read_json, write_json, write_text
from tsmc.proposal import proposal_log_probs
from twist import load_pair

PROMPT = "Once upon a time, there was a"


def test_runs_and_texts_of_any_method_stand_side_by_side(tmp_path, capsys, finished_run):
    rude, own, numbers = (tmp_path / name for name in ("rude.txt", "own.txt", "log-q"))
    rude.write_text(f"{PROMPT} stupid ugly man.\n{PROMPT} fat ugly pig.\n\n")
    rows = (finished_run / "generation-1" / "samples.jsonl").read_text().splitlines()
    own.write_text("\n".join(json.loads(row)["text"].replace("\n", r"\n") for row in rows))
    world = load_world(saved_config(finished_run).run)
    pair = load_pair(TrainedRun(finished_run).folder, world.base)
    log_q = proposal_log_probs(pair.model, pair.twist, world.exact.tokens)[1]
    numbers.write_text("\n".join(map(str, log_q.tolist())))
    options = ["--texts", str(rude), str(own), "--log-q", str(numbers), "--best-of", "3"]
    compare.main([str(finished_run), *options])
    head, *lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0].split("/")[-1]: line.split() for line in lines}
    assert "toxicity" in head and {"Base", "Target"} < cells.keys()
    row = read_results(finished_run)["generations"][1]
    assert f"{row['kl_target_proposal']:.2f}" == cells["log-q"][1]
    assert f"{row['toxicity']:.3f}" == cells["own.txt"][1]
    assert float(cells["rude.txt"][1]) > 0.5 > float(cells["Base"][1])
    assert float(cells["Best of 3"][3]) >= float(cells["Base"][1])
    for option, content, words in (
        ("--texts", f"{PROMPT} man.\n\n", "it holds 1 texts, at least 2 are needed"),
        ("--texts", f"{PROMPT} man.\nA man.\n", "'A man.' does not begin with 'Once upon a"),
        ("--log-q", "-1.0\n" * 59 + "x", "holds no log q .*'x'.*give 60 lines"),
    ):
        own.write_text(content)
        line = refusal(finished_run, option, own, command=compare.main)
        assert re.search(f"{own}: .*{words}", line), line


def test_seeds_are_averaged_and_variants_have_rows_of_their_own(tmp_path, capsys, finished_job):
    weighted, pooled = finished_job("weighted"), finished_job("pooled")
    capsys.readouterr()  # what they may have printed

    def changed(name: str, toxicity: float, **options: object) -> Path:
        """The run `weighted` with other options, and another toxicity in generation 1."""
        results = read_results(weighted)
        results["generations"][1]["toxicity"] = toxicity
        write_json(tmp_path / name / "results.json", results)
        write_json(tmp_path / name / "config.json", read_json(weighted / "config.json") | options)
        return tmp_path / name

    one, two = changed("one", 0.5), changed("two", 0.6, seed=1)
    drifting = changed("drifting", 0.7, effective_potential=False)
    compare.main([str(run) for run in (one, two, pooled, drifting)])
    _, *lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    learners = ("weighted (1)", "pooled", "weighted (3)")
    rows = [f"{name}, generation {m}" for name in learners for m in (0, 1)]
    assert {*names[:2]} == {"Base", "Target"} and names[2:] == rows
    # Student's t with one degree of freedom: 12.71 times the error of .05
    assert "0.550 ± 0.635" in lines[3] and "0.700" in lines[7]
    networks = read_json(weighted / "config.json")["networks"]

    def own(digest: str) -> Path:
        """The run for a user's file of a digest, by one of two spellings of its path."""
        name = f"{digest}/../own.py"
        options = {"potential": [f"{name}:phi"], "networks": networks | {name: digest}}
        return changed(f"own-{digest}", 0.5, **options)

    for given, words in (
        ([one, changed("other", 0.5, beta=1.0)], "differs from .*one in beta"),
        ([own("0"), own("1")], "differs from .*in potential"),
        ([one, weighted], "another run has its seed"),
        ([weighted, "--best-of", 0], "a sample of size 0"),
        ([tmp_path], "config.json: no such file; name a run"),
    ):
        line = refusal(*given, command=compare.main)
        assert re.search(words, line), line


def test_a_study_skips_what_is_finished_and_resumes_what_was_begun(tmp_path, monkeypatch, capsys):
    """And every command of the study is understood."""
    for options, _ in study.RUNS.values():
        read_config(options.split(), "")
    monkeypatch.chdir(tmp_path)
    runs = {"one": ("--length 5", (1, 2)), "two": ("--learner bad", (1,)), "three": ("", (1,))}
    monkeypatch.setattr(study, "RUNS", runs)
    started = []

    def begin(command: list[str], **_: object) -> SimpleNamespace:
        """In place of main.py, which fails where it is told so."""
        started.append(" ".join(command[1:]))
        write_text(Path(command[-1]) / "config.json", "{}")
        if "bad" not in command:
            write_text(Path(command[-1]) / "results.json", "{}")
        return SimpleNamespace(returncode=2 * ("bad" in command))

    def run_study(arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["study", *arguments])
        study.main()

    monkeypatch.setattr(study.subprocess, "run", begin)
    given = ["--out", "out", "--jobs", "1", "--only", "one", "two"]
    assert "1 runs failed" in refusal(*given, command=run_study)
    assert capsys.readouterr().out.splitlines()[1:] == ["out/one-2: done", "out/two-1: failed"]
    Path("out/one-2/results.json").unlink()
    run_study(given)
    assert started == [
        *(f"main.py --length 5 --seed {n} --out out/one-{n}" for n in (1, 2)),
        "main.py --learner bad --seed 1 --out out/two-1",
        *(f"main.py --resume out/{name}" for name in ("one-2", "two-1")),
    ]
    assert "invalid choice: 'four'" in refusal("--only", "four", command=run_study)


def make_study(folder: Path, run: Path, names: Iterable[str]) -> None:
    """Copies of a run under these names of the study. Of the run number n there and its seed number
    s, generation m has toxicity .1 + .05 n + .01 s + .2 m, KL 4 - m, and ten seconds."""
    for name in names:
        number = list(study.RUNS).index(name)
        for place, seed in enumerate(study.RUNS[name][1]):
            path = folder / f"{name}-{seed}"
            results = read_results(run)
            results["generations"].append(results["generations"][1].copy())
            for m, row in enumerate(results["generations"]):
                row["toxicity"] = 0.1 + 0.05 * number + 0.01 * place + 0.2 * m
                row |= {"kl_target_proposal": 4.0 - m, "generation": m, "scores": 100 * m}
                write_json(path / f"generation-{m}" / "seconds.json", {"core_seconds": 10.0})
                write_text(path / f"generation-{m}" / "metrics.jsonl", '{"distinct": 7}\n')
            write_json(path / "results.json", results)


MARKED = "text\n<!-- table {} -->\nold\n<!-- end -->\nafter\n"


def test_the_tables_and_figures_of_a_study_and_of_a_part_of_it(tmp_path, finished_job):
    folder, run, page = tmp_path / "study", finished_job("weighted"), tmp_path / "page.md"
    empty = "".join(MARKED.format(name) for name in report.TABLES)
    page.write_text(empty)
    make_study(folder, run, ["pooled"])
    line = refusal(folder, page, command=report.main)
    assert "study: holds no finished run weighted-SEED" in line and page.read_text() == empty
    make_study(folder, run, ["weighted"])
    report.main([str(folder), str(page)])
    assert "| weighted 1 | " in page.read_text() and "| paper 1 | " not in page.read_text()
    make_study(folder, run, study.RUNS)
    report.main([str(folder), str(page)])
    tables = read_json(tmp_path / "results" / "results.json")["tables"]
    for name, (rows, columns) in report.TABLES.items():
        assert list(tables[name]) == rows
        assert all(len(cells) == len(columns) for cells in tables[name].values())
    assert tables["changes"]["weighted 2 > pooled 2"][0] == "0.050"
    assert tables["beside"]["pooled 2 > dpo-full 0"][::2] == ["-0.200", "2.00"]
    assert tables["record"]["pooled KL 3.0"] == ["5", "1.0", "100", "20"]
    assert tables["record"]["paper KL 2.0"] == ["5", "2.0", "200", "30"]
    assert tables["diagnostics"]["paper 1"][-1] == "7"
    filled = page.read_text()
    # Student's t with four degrees of freedom: 2.776 times .01581 / sqrt(5)
    assert "| weighted 1 | 0.370 ± 0.020 |" in filled and "| paper 0 → paper 2 | 0.400 |" in filled
    assert filled.count("<!-- end -->\nafter\n") == len(report.TABLES)
    figures = {path.name for path in (tmp_path / "results").glob("*.png")}
    assert figures == {"generations.png", "populations.png", "budgets.png", "beta.png"}
    page.write_text(MARKED.format("luck"))
    assert "table luck: is not one of" in refusal(folder, page, command=report.main)
    assert page.read_text() == MARKED.format("luck")
