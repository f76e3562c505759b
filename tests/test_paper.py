"""The study end to end at a tiny scale: its products, resuming, refusals, failures, and a report that says what was found."""

import contextlib
import csv
import dataclasses
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import main
from distill import DistillConfig
from eval.paper import __main__ as paper
from eval.paper import study
from eval.paper.claims import kl_claims
from eval.paper.numbers import NAMES, Numbers, mean_of
from eval.paper.report.page import text_table
from eval.paper.study import StudyConfig, cost_of, tsmc_units
from eval.run.options import EvaluationConfig, RunConfig
from eval.run.setup import load_ingredients
from tinystories import Conditional
from tsmc.steps import Phase
from twist import CTLConfig

TINY = StudyConfig(
    seeds=(1, 2),
    rejection_betas=(0.0, 0.3),
    rejection_samples=60,
    particle_counts=(4, 6),
    particles_per_point=12,
    least_runs=2,
    resampling_runs=2,
    similarity_samples=50,
    texts=2,
    replicates=20,
    methods=("grpo-lora",),
    learning_rates=(1e-3,),
    dpo_strengths=(0.1,),
    grpo_strengths=(0.04,),
    baseline_batch=4,
    baseline_updates=2,
    run=RunConfig(
        generations=1,
        beta=0.3,
        length=5,
        rows=20,
        particles=4,
        save_every=1.0,
        ctl=CTLConfig(updates=4, batch_size=6),
        distill=DistillConfig(runs=4, updates=3, batch_size=4),
        eval=EvaluationConfig(particles=4, runs=3, base_samples=12),
    ),
)
PRODUCTS = ("results.json", "results.csv", "figures/similarity-toxicity.svg")


def job(arguments: list[str], log: str) -> None:
    """What a child process runs: the study in place of the quick one, everything it says into a file."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    torch.set_num_threads(1)
    study.STUDIES["quick"] = TINY
    with open(log, "a") as sys.stderr, contextlib.redirect_stdout(sys.stderr):
        paper.main(["--quick", *arguments])


@pytest.fixture(scope="module")
def start():
    """Start the study in a process of its own, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_paper", "eval.paper.schedule", "torch._dynamo"])

    def started(out: Path, *more: str):
        process = context.Process(target=job, args=(["--out", str(out), *more], str(out) + ".log"))
        process.start()
        return process

    return started


@pytest.fixture(scope="module")
def whole(tmp_path_factory, start) -> Path:
    """The study that nothing happens to."""
    out = tmp_path_factory.mktemp("whole") / "study"
    process = start(out, "--jobs", "2")
    process.join()
    assert process.exitcode == 0, Path(f"{out}.log").read_text()
    return out


def numbers_of(out: Path) -> list[dict]:
    """The rows of results.json."""
    return json.loads((out / "results.json").read_text())["numbers"]


def test_every_section_has_its_numbers(whole):
    rows = numbers_of(whole)
    found = {(row["section"], row["name"], row["seed"], row["generation"], row["quantity"]) for row in rows}
    for name in (NAMES["tsmc"], NAMES["lora"], NAMES["no-effective"]):
        assert {("generations", name, seed, m, "kl") for seed in (1, 2, "mean") for m in (0, 1)} <= found
    assert {("particles", f"K = {k}", "mean", 1, "toxicity") for k in (4, 6)} <= found
    assert len({row["name"] for row in rows if row["section"] == "resampling"}) == 9
    assert {row["seed"] for row in rows if row["section"] == "best"} == {1, 2, "mean", "other seeds"}
    assert ("rejection", "beta 0", "", "", "acceptance") in found
    for row in rows:
        assert row["low"] is None or row["low"] <= row["value"] <= row["high"], row
    with open(whole / "results.csv", newline="") as file:
        assert [row["quantity"] for row in csv.DictReader(file)] == [row["quantity"] for row in rows]


def test_variants_share_generation_0_and_differ_behind_it(whole):
    rows = [row for row in numbers_of(whole) if (row["seed"], row["quantity"]) == (1, "kl")]
    value = {(row["name"], row["generation"]): row["value"] for row in rows}
    kinds = [NAMES[kind] for kind in ("tsmc", "no-effective", "lora")]
    assert len({value[kind, 0] for kind in kinds}) == 1 and len({value[kind, 1] for kind in kinds}) == 3


def numeric_cells(report: str) -> set[str]:
    """Every number, and every limit of one, in the tables of the report but for texts and the section on how it was made."""
    tables = report[: report.index('<section id="making"')]
    cells = re.findall(r"<td>(.*?)</td>", tables.replace("−", "-"))
    return {part for cell in cells for part in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", re.sub(r"<small>|to", " ", cell))}


def test_every_number_of_the_report_is_in_the_results(whole):
    values = [row[key] for row in numbers_of(whole) for key in ("value", "low", "high") if row[key] is not None]
    forms = [f"{value:.{digits}f}" for value in values for digits in (1, 2, 3)]
    forms += [form.lstrip("-") for form in forms if not float(form)] + [f"{value:+.2f}" for value in values]
    forms += [f"{100 * value:.3f}" for value in values] + [f"{value:,}" for value in values]
    known = {"7.971", "7.030", "7.016", "-0.941", "-0.014", "0"}  # the paper's, and the drift that phi^(m) rules out
    known |= {"100.00", "0.010", "0.456", *(str(TINY.runs_of(count)) for count in TINY.particle_counts)}
    cells = numeric_cells((whole / "report.html").read_text())
    assert len(cells) > 100 and cells <= {*forms, *known}, cells - {*forms, *known}


def test_the_report_is_complete_in_itself(whole):
    report = (whole / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|\#)""", report) and "@import" not in report
    assert report.count("data:image/svg+xml") == 3 and report.count("<section") == 9
    for target in re.findall(r'href="#(.*?)"', report):
        assert f'id="{target}"' in report
    for name in ("similarity-toxicity", "toxicity-histograms", "toxicity-particles"):
        assert (whole / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_texts_cannot_break_the_page():
    html = text_table("", [{"toxicity": 0.5, "text": "a <script>x</script>\n& so"}])
    assert "&lt;script&gt;" in html and "<script>" not in html and "\\n&amp; so" in html


def test_kills_at_any_moment_change_nothing(tmp_path, start, whole):
    out, moments = tmp_path / "study", random.Random(0)
    for jobs in (1, 2, 3, 2):
        process = start(out, "--jobs", str(jobs))
        process.join(0.3 + 2 * moments.random())
        process.kill()
        process.join()
    process = start(out, "--jobs", "3")
    process.join()
    assert process.exitcode == 0, Path(f"{out}.log").read_text()
    for name in PRODUCTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert not list(out.rglob(".*")) and not (out / "shared").exists()


def test_ctrl_c_stops_everything_and_says_how_to_go_on(tmp_path, start):
    out = tmp_path / "study"
    process = start(out, "--jobs", "2")
    while process.is_alive() and not (out / "runs" / "tsmc-1" / "metrics.jsonl").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    last = Path(f"{out}.log").read_text().splitlines()[-1]
    assert process.exitcode == 130 and "go on with python -m eval.paper --quick" in last and str(out) in last
    assert not (out / "report.html").exists()


def test_a_part_that_fails_is_named_and_leaves_the_others(tmp_path, start, whole):
    out = tmp_path / "study"
    shutil.copytree(whole, out)
    for name in ("lora-1", "particles-2"):
        (out / "parts" / f"{name}.json").unlink()
    shutil.rmtree(out / "runs" / "lora-1")
    (out / "runs" / "lora-1").write_text("in the way")
    (out / "report.html").unlink()
    process = start(out)
    process.join()
    lines = Path(f"{out}.log").read_text().splitlines()
    assert process.exitcode == 2 and "1 part failed (lora-1)" in lines[-1] and "logs" in lines[-1]
    assert any(line.startswith("lora-1  FAILED") and "exists already" in line for line in lines)
    assert (out / "parts" / "particles-2.json").read_bytes() == (whole / "parts" / "particles-2.json").read_bytes()


def refusal(*arguments: str) -> str:
    """The single line with which the study refuses to start."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        paper.main(list(arguments))
    assert ended.value.code == 2
    (line,) = errors.getvalue().strip().splitlines()
    return line


def test_a_directory_of_another_study_is_refused_with_the_keys(tmp_path, whole, monkeypatch):
    changed = dataclasses.replace(TINY, texts=3, run=dataclasses.replace(TINY.run, length=6))
    monkeypatch.setitem(study.STUDIES, "quick", changed)
    line = refusal("--quick", "--out", str(whole))
    assert "texts, run.length" in line and "seeds" not in line
    (tmp_path / "precious").write_text("mine")
    assert "other files" in refusal("--quick", "--out", str(tmp_path))


def test_two_studies_never_write_into_one_directory(whole, monkeypatch):
    monkeypatch.setitem(study.STUDIES, "quick", TINY)
    with paper.locked(whole):
        assert "another study is writing there" in refusal("--quick", "--out", str(whole))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--jobs", "0"], "--jobs"),
        (["--seeds", "1"], "--seeds"),
        (["--preset", "huge"], "pocket"),
        (["--preset", "paper"], "TinyStories-33M"),
    ],
)
def test_bad_options_are_refused(tmp_path, arguments, word):
    assert word in refusal("--out", str(tmp_path / "study"), *arguments)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("values", "verdict", "verb"),
    [
        ([-1.0, -1.1, -0.9], "yes", "falls"),
        ([1.0, 1.1, 0.9], "no", "rises"),
        ([-1.0, 1.0, 0.1], "open", "no clear change"),
    ],
)
def test_claims_say_what_the_numbers_show(values, verdict, verb):
    numbers = Numbers()
    numbers.add("changes", "generation 0 to 1", "mean", "", "kl", mean_of(values))
    one = dataclasses.replace(TINY, run=dataclasses.replace(TINY.run, generations=1))
    (claim,) = kl_claims(one, numbers)
    assert claim.verdict == verdict and verb in claim.text and "paper: -0.941" in claim.text


@pytest.mark.parametrize("method", study.METHODS)
def test_baselines_spend_what_algorithm_1_spends(method):
    pocket = study.STUDIES["pocket"]
    budget = tsmc_units(pocket.run)
    for chosen in pocket.grid(method):
        spent = cost_of(method, chosen).units(20)
        assert budget - spent / chosen.updates < spent <= budget


class Plain:
    """Stands in for a run's directory: its phases are bare loops."""

    def phase(self, *name: object) -> Phase:
        return Phase()


def test_the_budget_is_what_algorithm_1_asks_of_the_language_model(monkeypatch):
    config, asked = TINY.run, []
    decoder, log_probs = Conditional.decoder, Conditional.log_probs

    def counted_decoder(self, rows: int):
        asked.append(rows * (self.length - 1))
        return decoder(self, rows)

    def counted_log_probs(self, tokens: torch.Tensor):
        asked.append((3 if torch.is_grad_enabled() else 1) * len(tokens) * (self.length - 1))
        return log_probs(self, tokens)

    given = load_ingredients(config)
    monkeypatch.setattr(Conditional, "decoder", counted_decoder)
    monkeypatch.setattr(Conditional, "log_probs", counted_log_probs)
    monkeypatch.setattr(
        sys.modules["distill.self_distill"], "held_out_loss", lambda models, held_out: 0.0
    )  # evaluation
    sigmas = given.sigmas()
    for m in range(config.generations + 1):
        twist = main.contrastive_twist_learning(config, sigmas, m, Plain())
        if m < config.generations:
            sigmas = given.sigmas(main.distil_samples(config, given, sigmas, twist, m + 1, Plain()))
    assert sum(asked) == tsmc_units(config)
