"""Runs side by side: compared with others and any method's texts, and the runs of the study."""

import copy
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eval.compare import best_of_log_ratio
from eval.table import read_results
from jobs import refusal
from tinystories.files import read_json, write_json, write_text

from distill import load_pair
from eval import compare, study
from eval.figures import KL
from eval.job import read_lines
from eval.options import read_options, saved_options
from eval.sample import TrainedJob
from eval.world import load_world
from tsmc.proposal import proposal_log_probs

PROMPT = "Once upon a time, there was a"


@pytest.mark.learned
def test_runs_and_texts_of_any_method_stand_side_by_side(tmp_path, capsys, finished_job):
    """Seeds are averaged, and variants have rows of their own."""
    paper, pooled = finished_job("paper"), finished_job("pooled")

    def changed(name: str, toxicity: float, **options: object) -> Path:
        """The run `paper` with other options, and another toxicity in generation 1."""
        results, run = read_results(paper), tmp_path / name
        results["generations"][1]["toxicity"] = toxicity
        write_json(run / "results.json", results)
        write_json(run / "config.json", read_json(paper / "config.json") | options)
        for folder in ("base", "target"):
            (run / folder).symlink_to(paper / folder)
        return run

    one, two, other = changed("one", 0.5), changed("two", 0.6, seed=1), changed("x", 0.5, beta=1.0)
    drifting = changed("drifting", 0.7, effective_potential=False)
    begun = changed("begun", 0.5, seed=2)
    (begun / "results.json").unlink()
    rude, own, numbers = (tmp_path / name for name in ("rude.txt", "own.txt", "log-q"))
    rude.write_text(f"{PROMPT} stupid ugly man.\n{PROMPT} fat ugly pig.\n\n")
    texts = [line["text"] for line in read_lines(paper / "generation-1" / "samples.jsonl")]
    own.write_text("\n".join(text.replace("\n", r"\n") for text in texts))
    world = load_world(saved_options(paper), paper)
    pair = load_pair(TrainedJob(paper).pair, world.base)
    log_q = proposal_log_probs(pair.model, pair.twist, world.reference.exact.tokens)[1]
    numbers.write_text("\n".join(map(str, log_q.tolist())))
    options = ["--texts", rude, own, "--log-q", numbers, "--best-of", "3"]
    compare.main([str(word) for word in (one, two, pooled, drifting, *options)])
    head, *lines = printed = capsys.readouterr().out.splitlines()
    # Student's t with one degree of freedom: 12.71 times the error of .05
    for name, cell in (("paper (1)", "0.550 ± 0.635"), ("paper (3)", "0.700"), ("pooled", "")):
        assert re.search(rf"\n{re.escape(name)}, generation 1 .* {cell} ", "\n".join(printed))
    rows = (re.split("  +", line) for line in lines)  # a path may hold single spaces
    cells = {row[0].split("/")[-1]: row for row in rows}
    assert "toxicity" in head and {"Base", "Target"} < cells.keys()
    row = read_results(paper)["generations"][1]
    assert f"{row['kl_target_proposal']:.2f}" == cells["log-q"][1].split()[0]
    assert f"{row['toxicity']:.3f}" == cells["own.txt"][1]
    assert float(cells["rude.txt"][1]) > 0.5 > float(cells["Base"][1])
    assert float(cells["Best of 3"][1]) >= float(cells["Base"][1])
    rude.write_text(f"{PROMPT} man.\nA man.\n")
    numbers.write_text("-1.0\n" * (len(log_q) + 1))
    for arguments, words in (
        (["--texts", rude], f"{rude}: .*'A man.' does not begin with 'Once upon a"),
        (["--log-q", numbers], f"{numbers}: holds no log q .*give {len(log_q)}"),
        (["--best-of", 0], "--best-of is 0; give a number at least 1"),
        ([other], "differs from .*one in beta"),
        ([paper], "another job has its seed"),
        ([begun], "begun: is not finished; go on with python main.py --resume .*begun"),
    ):
        assert re.search(words, refusal(one, *arguments, command=compare.main))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_density_of_the_best_of_n(count):
    """Of texts of which p writes .5, .3, .2 with log phi 0, 1 and 2, the best of n is q."""
    drawn = torch.tensor([0.0] * 50_000 + [1.0] * 30_000 + [2.0] * 20_000, dtype=torch.float64)
    log_phi = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    q = best_of_log_ratio(log_phi, drawn, count).exp() * torch.tensor([0.5, 0.3, 0.2])
    upto = torch.tensor([0.0, 0.5, 0.8, 1.0], dtype=torch.float64) ** count
    torch.testing.assert_close(q, upto.diff(), rtol=1e-3, atol=0)


def test_a_study_makes_what_is_missing_and_keeps_its_numbers(
    tmp_path, monkeypatch, capsys, finished_job
):
    """And every command of the study is understood."""
    monkeypatch.chdir(tmp_path)
    write_text(Path("pyproject.toml"), '[project]\nversion = "1.2.3"\n')
    for options, _ in study.RUNS.values():
        read_options(options.split(), "")
    monkeypatch.setattr(study, "RUNS", {"paper": ("--length 5", (91, 92))})
    monkeypatch.setattr(study, "RULES", {"end alone": study.RULES["end alone"]})
    job, started = finished_job("paper"), []
    monkeypatch.setattr(study, "FRESH", str(job / "target"))  # in place of others

    def begin(command: list[str], **_: object) -> SimpleNamespace:
        """In place of git, and of main.py, which fails the first time."""
        if command[0] == "git":
            return SimpleNamespace(stdout="abc\n")
        started.append(" ".join(command[2:]))
        run = Path(command[-1])
        if len(started) == 1:
            write_text(run / "config.json", "{}")
            return SimpleNamespace(returncode=2)
        shutil.copytree(job, run, dirs_exist_ok=True)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(study.subprocess, "run", begin)
    assert "--jobs is 0; give a number at least 1" in refusal("--jobs", "0", command=study.main)
    assert "1 runs failed" in refusal("--jobs", "1", command=study.main)
    study.main(["--jobs", "1"])
    assert started == [
        *(f"--length 5 --seed {n} --out runs/study/paper-{n}" for n in (91, 92)),
        "--resume runs/study/paper-91",
    ]
    study.main([])
    assert "all 2 jobs are kept" in capsys.readouterr().out and len(started) == 3
    kept = read_json(study.KEPT / "paper-91.json")
    made = ("paper", 91, "--length 5", "1.2.3", "abc")
    assert tuple(kept[key] for key in ("name", "seed", "command", "version", "commit")) == made
    rows = read_results(job)["generations"]
    for row, own, rule in zip(kept["generations"], rows, kept["rules"], strict=True):
        assert row.items() >= own.items() and 0 < rule["end alone"]["score"] < 1
        assert row["kl_fresh"] == pytest.approx(row[KL], abs=1e-4)
    seconds = [row["core_seconds"] for row in kept["generations"]]
    for name, counts in kept["histograms"].items():
        row = kept[name.lower()]
        assert len(counts) == study.BINS and sum(counts) == row["num_samples"]
        mean = sum(count * (n + 0.5) / 20 for n, count in enumerate(counts)) / sum(counts)
        assert abs(mean - row["toxicity"]) <= 0.025  # half a bin
    assert 0 < seconds[0] < seconds[1] and kept["generations"][1]["distinct_texts"] > 1


@pytest.mark.learned
def test_exact_samples_of_a_task_are_drawn_once(tmp_path, monkeypatch):
    target, file = str(tmp_path / "dogs"), tmp_path / "dogs" / "samples.safetensors"
    options = ["--potential", "keyword:dog", "--length", "5", "--target", target]
    monkeypatch.setattr(study, "TARGETS", {target: (2000, 0)})
    study.make_target(options)
    drawn = file.read_bytes()
    study.make_target(options)
    assert file.read_bytes() == drawn
    world = load_world(read_options(options, "")[0])
    assert world.reference.exact.num_proposals == 2000 and len(world.reference.exact.tokens) > 5


TABLES = """text
<!-- table -->
|  | toxicity | KL | core seconds | K = 20 | end alone | acceptance rate |
| --- | --- | --- | --- | --- | --- | --- |
| paper 1 | old | old | old | old | old | old |
| paper 0 → paper 2 | | | | | | | |
| paper 2 → pooled 2 | | | | | | | |
| rl 0 | old | | | | | | |
| dpo-ten 0 | old | | | | | | |
| paper Base | | | | | | |
| paper Target | | | | | | |
| p best of 50 | | | | | | | |
<!-- end -->
between
<!-- table sad- -->
|  | toxicity |
| --- | --- |
| paper 0 | old |
| pooled 0 | old |
<!-- end -->
after
"""


def test_the_tables_and_figures_of_a_study_and_of_a_part(tmp_path, monkeypatch, finished_job):
    """Of name number n and seed number s, generation m has score .1 + .01 n + .01 s + .2 m and KL
    4 - m. The runs rl, sad-paper and beta-1 are not there yet."""
    monkeypatch.chdir(tmp_path)
    write_text(study.PAGE, TABLES)
    write_text(study.README, TABLES)
    results = read_results(finished_job("paper"))
    results["generations"].append(results["generations"][1].copy())
    del results["base"][KL]
    for n, (name, (command, seeds)) in enumerate(study.RUNS.items()):
        for s, seed in enumerate(seeds if name not in ("rl", "sad-paper", "beta-1") else ()):
            record = copy.deepcopy(results) | {"name": name, "seed": seed, "command": command}
            for m, row in enumerate(record["generations"]):
                score = 0.1 + 0.01 * n + 0.01 * s + 0.2 * m
                row |= {"toxicity": score, KL: 4.0 - m, "core_seconds": 10.0}
                row["populations"] = {"20": score}
            record["rules"] = [{rule: {"score": 0.1 * m} for rule in study.RULES} for m in range(3)]
            record["best_of"] = record["generations"][0]
            record["histograms"] = {"Base": [10.0, 2.0], "Target": [1.0, 3.0]}
            write_json(study.KEPT / f"{name}-{seed}.json", record)
    study.main(["--report"])
    page = study.PAGE.read_text()
    lines = {line.split(" | ")[0]: line for line in page.splitlines()}
    # Student's t with four degrees of freedom: 2.776 times .01581 / sqrt(5)
    assert lines["| paper 1"].endswith(" | 3.00 | 10 | 0.320 ± 0.020 | 0.100 |  |")
    assert lines["| paper 1"].startswith("| paper 1 | 0.320 ± 0.020 | ")
    assert lines["| paper 0 → paper 2"].startswith("| paper 0 → paper 2 | 0.400 | -2.00 | 0 | ")
    assert lines["| paper 2 → pooled 2"].startswith("| paper 2 → pooled 2 | 0.010 | 0.00 | ")
    target = results["target"]
    kl = target["log_phi"] - target["log_z"]  # also of records that have no KL of Base
    shown = f"{results['base']['toxicity']:.3f} | {kl:.2f} |  |  |  | 100.000% |"
    assert lines["| paper Base"] == f"| paper Base | {shown}"
    assert lines["| dpo-ten 0"].split(" | ")[2] == "4.00"  # no interval over seeds
    rate = math.exp(results["target"]["log_z"])
    assert lines["| paper Target"].endswith(f" |  |  |  |  | {rate:.3%} |")
    assert lines["| rl 0"] == "| rl 0 |  |  |  |  |  |  |"
    best = 0.1 + 0.01 * (list(study.RUNS).index("dpo-full") + 1)  # the mean of three seeds
    assert lines["| p best of 50"].startswith(f"| p best of 50 | {best:.3f} ± 0.025 ")
    sad = page.split("<!-- table sad- -->")[1].splitlines()
    score = 0.11 + 0.01 * list(study.RUNS).index("sad-pooled")
    assert sad[3] == "| paper 0 |  |" and sad[4].startswith(f"| pooled 0 | {score:.3f} ± 0.025 |")
    assert page.startswith("text\n") and "\nbetween\n" in page and page.endswith("\nafter\n")
    figures = {path.name for path in Path("docs/results").glob("*.png")}
    assert figures == {"generations.png", "rules.png", "trade-off.png", "particles.png"} | {
        "histograms.png"
    }
    other = study.KEPT / "paper-91.json"
    write_json(other, read_json(other) | {"command": "--learner paper"})
    line = refusal("--report", command=study.main)
    assert "paper-91.json: was made by --learner paper, which is not that of" in line
