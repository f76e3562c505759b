"""The main job at a small scale: its files, learners, figures, options; how commands end."""

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from eval.command import one_line_errors
from eval.table import aligned, closing, named_rows, read_results
from jobs import JOBS, contents, products, refusal, run_main
from tinystories.files import read_tensors

import main
from distill import load_pair
from eval import metrics
from eval.figures import draw_figures
from eval.job import Job, read_lines
from eval.metrics import KL, energy_distance, energy_floor, mean_pairwise_cosine
from eval.options import Options, read_options
from eval.sample import TrainedJob
from eval.world import SAMPLES, load_world
from tsmc import Population
from tsmc.estimate import Estimate
from tsmc.proposal import proposal_log_probs

ROOT = Path(__file__).parents[1]
PROMPT = "Once upon a time, there was a"
PHASES = [["twist learning"] * 4]
PHASES += [["distilled texts", *["distillation"] * 3, *["distillation, held out"] * 2, *PHASES[0]]]
# What a row has beside its columns.
BESIDE = {"generation", "examples", "num_samples", "num_proposals", "num_runs", "log_z_std_error"}
BESIDE |= {"kl_half_width", "populations"}  # the mean score of populations of K particles, by K


def test_the_files_of_a_run_hold_what_is_promised(finished_job, tmp_path):
    run = shutil.copytree(finished_job("paper"), tmp_path / "run")
    for m, row in enumerate(read_results(run)["generations"]):
        assert row["generation"] == m and row["populations"].keys() == {"4", "2"}
        assert 1 <= row["ess"] <= 4 and 1 / 4 <= row["distinct"] <= 1
        records = read_lines(run / f"generation-{m}" / "metrics.jsonl")
        assert [record["phase"] for record in records] == PHASES[m]
        assert len(read_lines(run / f"generation-{m}" / "samples.jsonl")) == 20
    main.main(["--resume", str(run)])
    (figure,) = (run / "figures").iterdir()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_exact_samples_that_are_shipped_are_those_of_the_shipped_networks():
    world = load_world(Options(device="cpu"))
    assert world.score(world.reference.exact.tokens).scores["toxicity"].mean() > 0.5


NARROW = ["--dtype", "bfloat16"]
END_ALONE = [*JOBS["paper"], "--resampling", "systematic", "--ess-threshold", "0"]
OTHER_SEED = ["--seed", "1", "--eval-target-proposals", "0"]  # and no exact samples
VARIANTS = JOBS | {
    "narrow LoRA": [*END_ALONE, *NARROW, "--student", "lora", "--no-effective-potential"],
    "pooled, narrow": [*JOBS["pooled"], *NARROW],
    "no surrogate": [*JOBS["pooled"], "--no-surrogate", *OTHER_SEED],
    "narrow GRPO by LoRA": [*JOBS["grpo"], *NARROW, "--student", "lora"],
    "dpo, hard": [*JOBS["dpo"], "--potential", "keyword:named", "--generations", "0"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_learns_and_loads_as_it_was(tmp_path, finished_job, monkeypatch, name):
    """And a run of the same options elsewhere is the same to the byte."""
    keep, path, options = Job.keep, tmp_path / "run", VARIANTS[name]
    is_policy, is_adapter = "--updates" in options, "--pool-draws" in options
    wanted = "(q|v)_proj.weight" if "lora" in options else "wte|wpe|proj|fc|ln_"

    def keep_and_load(run, m, row, samples, learner, pair=None) -> None:
        keep(run, m, row, samples, learner, pair)
        if m is None:
            return
        again = load_pair(run.folder(m) / "pair.safetensors", learner.base)
        tokens = torch.arange(40, 60).view(4, 5)
        both = [proposal_log_probs(one.model, one.twist, tokens) for one in (again, pair)]
        torch.testing.assert_close(*both, rtol=0, atol=0)
        if is_policy or (m == 1 and not is_adapter):
            before, after = learner.base.network.state_dict(), pair.model.network.state_dict()
            changed = {name for name in after if not torch.equal(after[name], before[name])}
            unlike = changed ^ {name for name in after if re.search(wanted, name)}
            records = read_lines(run.folder(m) / "metrics.jsonl")
            held = [one["loss"] for one in records if "held out" in one["phase"]] or [1, 0]
            is_learned = min(held) < held[0]  # else the runs held out have chosen no update
            assert bool(changed) == is_learned
            assert not unlike or not is_learned or "bfloat16" in options  # where a step may vanish
        assert (pair.twist is None) == (is_policy or is_adapter)

    monkeypatch.setattr(Job, "keep", keep_and_load)
    run_main([*options, "--out", path])
    drawn = TrainedJob(path).sample(particles=3, runs=2)
    assert len(drawn.texts) == 6 and drawn.evidence().value < 0
    if name in ("paper", "pooled", "dpo"):
        assert products(path) == products(finished_job(name))
    if name == "no surrogate":
        assert "target" not in read_results(path) and not (path / "target").exists()
        files = [run / "base/samples.jsonl" for run in (path, finished_job("pooled"))]
        mine, others = ([row["text"] for row in read_lines(file)[:20]] for file in files)
        assert mine != others
    if name == "dpo":  # a policy has one particle
        draw_figures(read_results(path), path)
    if name == "dpo, hard":  # texts of a policy with phi = 0 stay in its row
        row = read_results(path)["generations"][0]
        assert row["phi_positive"] < 1 and row["log_phi"] is None and len(row["examples"]) == 3


@pytest.mark.learned
def test_potentials_are_multiplied_and_a_hard_one_is_counted(tmp_path, capsys, monkeypatch):
    """The classifier is neither loaded nor shown where phi does not read it."""
    run, own = tmp_path / "my run", tmp_path / "own.py"
    monkeypatch.setattr(metrics, "warning_of", lambda *_: "they miss a part")
    own.write_text("def short(texts):\n    return [-len(text) / 50 for text in texts]\n")
    factors = ["regex: n", "keyword~3:named", f"{own}:short"]
    options = [word for factor in factors for word in ("--potential", factor)]
    run_main([*JOBS["pooled"], *options, "--toxicity-model", tmp_path / "nowhere", "--out", run])
    printed = capsys.readouterr()
    assert "they miss a part" in printed.err
    assert "log phi  phi > 0" in printed.out and "toxicity" not in printed.out
    assert printed.out.endswith(f"python -m eval.sample '{run}'\n")
    story = read_results(run)["generations"][0]["examples"][0]
    assert f"\n  {story}\n" in printed.err  # as the generation ends
    assert "half of the first draws are forced to hold a hint" in printed.err
    rows = [row for path in run.glob("*/samples.jsonl") for row in read_lines(path)]
    assert {row["source"] for row in rows} == {"base", "target", "generation 0", "generation 1"}
    for row in rows:
        text = row["text"].removeprefix(PROMPT)
        log_phi = -len(row["text"]) / 50 - 3 * (re.search(r"\bnamed\b", text) is None)
        assert row["log_phi"] == (pytest.approx(log_phi, abs=1e-5) if " n" in text else None)
    results = read_results(run)
    rates = [row["phi_positive"] for row in results["generations"]]
    assert results["target"]["phi_positive"] == 1 > results["base"]["phi_positive"] < min(rates)


BAD = {  # options, and a pattern of the one line
    "--learner pooled --ctl-updates=3": "--ctl-updates: .* it belongs to paper",
    "--eval-particles 9 0": "--eval-particles is 0; give a number at least 1",
    "--device gpu": "--device gpu: there is no such device here; give auto, cpu, cuda or cuda:N$",
    "--generation 2": "--generation: no option .*; did you mean --generations[?]$",
    "--no-surogate": "--no-surogate: no option .*; did you mean --surrogate[?]$",
    "runs/pocket": "runs/pocket: is not an option; a job is continued by --resume runs/pocket",
    "--target nosuch": "--target nosuch: there is no samples.safetensors; name the folder target/",
    "--similarity-model no/such/place": "--similarity-model no/such/place: ",
    "--beta nan": "--beta is nan; give a number at least 0",
    "--end END": "--end END.*name one",
    "--lm no/such/place": "--lm no/such/place: ",
    "--preset paper": "--similarity-model sentence-transformers/all-MiniLM-L6-v2@",
    "--potential ended": "--potential ended: .*name one with --end",
    "--out precious.txt": "--out precious.txt: exists already",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, monkeypatch, line):
    """Nor are networks loaded, but for their tokens."""
    told = []
    monkeypatch.setattr("eval.world.say", told.append)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious.txt").write_text("mine")
    before = contents(tmp_path)
    said = refusal("--out", "run", *line.split(" "))
    assert re.search(BAD[line], said), said
    assert told == ["loading the networks"] * ("END" in line)
    assert contents(tmp_path) == before and not (tmp_path / "run").exists()


def test_a_target_that_nothing_reaches_says_what_to_change(tmp_path, capsys):
    options = ["--eval-runs", 30, "--potential", "regex:zyzzyva", "--out", tmp_path / "run"]
    with pytest.raises(SystemExit, match="2"):
        run_main([*JOBS["paper"], *options])
    networks, base, rate, rejection, target, *_, last = capsys.readouterr().err.splitlines()
    assert (networks, base) == ("loading the networks", "base samples")  # a line for each phase
    assert "0 of 120 base samples have phi > 0" in rate and "pooled and hints" in rate
    assert rejection == "target by rejection"
    assert re.search("0 of 60 base samples.*no row Target.*--eval-target-proposals", target)
    assert re.search("all .* runs .* ended with weight zero; .*soften the potential", last)


def test_intervals_stand_in_the_table_and_the_kl_of_base_is_that_of_the_exact_samples(finished_job):
    """KL(sigma||p) = E_sigma[log phi] - log Z, and all that a row holds has been declared."""
    job = finished_job("paper")
    results = read_results(job)
    base, target, *rows = named_rows(results).values()
    stored = read_tensors(job / "target" / SAMPLES)["log_phi"].double()
    assert base[KL] == pytest.approx((stored.mean() - target["log_z"]).item(), abs=1e-4)
    error = math.hypot(stored.std().item() / len(stored) ** 0.5, target["log_z_std_error"])
    wanted = Estimate(0.0, error, len(stored) - 1).half_width()
    assert base["kl_half_width"] == pytest.approx(wanted, rel=1e-4)
    row = rows[-1]
    log_z = Estimate(row["log_z"], row["log_z_std_error"], 4).half_width()  # of five runs
    table = aligned({name: [one] for name, one in named_rows(results).items()}, metrics.COLUMNS)
    assert f" {row[KL]:.2f} ± {row['kl_half_width']:.2f}  " in table
    assert f" {row['log_z']:.2f} ± {log_z:.2f}  " in table
    declared = {one.key for one in metrics.COLUMNS + metrics.FURTHER} | BESIDE
    for name in ("paper", "dpo"):
        for row in named_rows(read_results(finished_job(name))).values():
            assert row.keys() <= declared


def test_dead_runs_take_no_share_but_their_texts_count_as_scored():
    """Three runs of two particles, the last one dead."""
    tokens = torch.arange(6).view(3, 2, 1)
    log_weights = torch.tensor([[0.25, 0.75], [0.0, 2.0], [0.0, 0.0]]).log()
    log_z = torch.tensor([3.0, 1.0, 0.0]).log()
    ess = torch.tensor([1.6, 1.0, 0.0])
    population = Population(tokens, log_weights, log_weights, tokens, tokens, log_z, ess)
    shares = torch.tensor([[0.1875, 0.5625], [0.0, 0.25], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(population.shares(), shares)
    row = metrics.population_row(population)
    assert row["log_z"] == population.log_mean_z() == pytest.approx(math.log(4 / 3))
    assert row["dead_runs"] == 1
    assert row["worth"] == pytest.approx(1 / shares.square().sum().item() / 6)
    assert row["log_z_hat_mean"] == pytest.approx(math.log(3) / 2)


def test_the_law_of_a_sample_is_that_of_all_runs_and_a_policy_has_a_weighted_score():
    """Runs of three draws from q, uniform over four texts of which one has phi = 0."""
    log_w = torch.tensor([0.1, 2.0, 0.7, 0.0]).log()
    law = torch.zeros(4)
    for run in itertools.product(range(4), repeat=3):
        weights = log_w[list(run)].softmax(0) if log_w[list(run)].isfinite().any() else None
        for n, k in enumerate(run):
            law[k] += 0.0 if weights is None else weights[n] / 4**3
    pairs = torch.tensor(list(itertools.product(range(4), repeat=2)))  # what else a run may have
    runs = torch.cat([torch.zeros(16, 1), log_w[pairs]], 1)  # [16, 3]
    found = metrics.log_law_of_samples(log_w[:3], runs) - math.log(4)
    torch.testing.assert_close(found.exp().float(), law[:3])
    assert metrics.log_law_of_samples(torch.tensor([math.inf]), runs).item() == math.log(3)  # q = 0
    samples = metrics.ScoredTexts(
        [""] * 6, {"log_phi": torch.tensor([1.0, 2, 3, -math.inf, 5, 6])}, []
    )
    weights = torch.tensor([[0.25, 0.75], [2.0, 0.0], [0.0, 0.0]]).log()
    assert metrics.weighted_score(weights, samples) == pytest.approx((1.75 + 3) / 2)
    assert metrics.weighted_score(torch.full((2, 3), -math.inf), samples) is None


def test_a_log_z_far_below_that_of_target_or_base_is_told_and_not_praised(finished_job):
    """A fifth of sigma is missing whatever the errors are: Base knows log Z too badly to see it."""
    results = read_results(finished_job("paper"))
    results["base"] |= {"log_z": -4.0, "log_z_std_error": 0.5, "num_samples": 2000}
    results["target"] |= {"log_z": -4.0, "log_z_std_error": 0.02, "num_proposals": 10_000}
    for row, log_z in zip(results["generations"], (-4.3, -4.9), strict=True):
        row |= {"log_z": log_z, "log_z_std_error": 0.05, "num_runs": 40}
    text = closing(results, Path("run"))
    warning = "In generation 1: log Z -4.90 of the runs lies below -4.00 of the row Target"
    assert warning in text and "In generation 0" not in text and "effective samples" not in text
    results["generations"][1]["log_z"] = -4.0
    text = closing(results, Path("run"))
    assert "In generation" not in text and "a score gives at most" in text
    del results["target"]
    results["generations"][1]["log_z"] = -4.9  # within the error of Base
    assert "In generation" not in closing(results, Path("run"))
    results["base"]["log_z_std_error"] = 0.02
    assert "lies below -4.00 of the row Base" in closing(results, Path("run"))


@pytest.mark.learned
def test_the_energy_distance_tells_distributions_apart_and_the_cosine_is_the_double_loop():
    source = torch.Generator().manual_seed(0)
    y, same, other = (torch.randn(400, 3, generator=source) for _ in range(3))
    distance = energy_distance(other + 1, y, torch.arange(400))
    assert abs(energy_distance(same, y, torch.arange(400))) < 2 * energy_floor(y, 400)
    between = torch.cdist(other + 1, y).mean()
    within = sum(torch.cdist(z, z).sum() / (400 * 399) for z in (other, y))
    assert distance == pytest.approx((2 * between - within).item(), abs=1e-4)
    copies, runs = (values[:100].repeat_interleave(4, 0) for values in (same, torch.arange(100)))
    assert abs(energy_distance(copies, y, runs)) < 0.1 * distance, "copies in a run do not count"
    unit = F.normalize(y[:6].double(), dim=-1)
    cosines = [unit[i] @ unit[j] for i in range(6) for j in range(6) if i != j]
    assert mean_pairwise_cosine(y[:6]) == pytest.approx(sum(cosines).item() / 30, abs=1e-12)


def test_defaults_are_those_of_the_learner_and_the_preset_and_what_is_given_comes_first():
    lines = ["--learner grpo", "--preset paper", "--preset paper --lm own --end . --end !"]
    grpo, genuine, given = (read_options(line.split(), "")[0] for line in lines)
    assert (grpo.generations, grpo.learning.strength, grpo.end) == (0, 0.64, ())
    assert genuine.lm.startswith("roneneldan/TinyStories-33M@")
    assert (given.lm, given.end) == ("own", (".", "!"))


MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


ERRORS = [
    (ValueError("a\nb\x1b[2J"), 2, r"error: a\nb\x1b[2J"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (RuntimeError(MEMORY), 2, "error: out of memory; lower"),
    (OSError(28, "Full", "x.json"), 2, "error: x.json: cannot be used (Full); free space"),
]


@pytest.mark.parametrize(("error", "code", "words"), ERRORS)
def test_every_error_is_one_line(capsys, monkeypatch, error, code, words):
    with pytest.raises(SystemExit) as ended, one_line_errors("program"):
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == code and line.startswith(f"program: {words}")
    if isinstance(error, ValueError):
        monkeypatch.setenv("TSMC_TRACEBACK", "1")
        with pytest.raises(ValueError), one_line_errors("program"):
            raise error


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


FULL_DISK = partial(open, "/dev/full", "w")
STREAMS = [(closed_pipe, 141, ""), (FULL_DISK, 2, "standard output"), (lambda: None, 0, "")]


@pytest.mark.parametrize(("stream", "code", "said"), STREAMS)
def test_output_that_cannot_be_written(finished_job, monkeypatch, capsys, stream, code, said):
    run, found = finished_job("paper"), 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream())
        try:
            run_main(["--resume", run])
        except SystemExit as ended:
            found = ended.code
    errors = capsys.readouterr().err
    assert found == code and said in errors and errors.count("\n") == 1 + bool(said)


def test_a_missing_package_says_what_to_install():
    """As where the virtual environment is not active: -S hides what is installed."""
    ended = subprocess.run([sys.executable, "-S", "main.py"], cwd=ROOT, capture_output=True)
    line = ended.stderr.decode()
    assert ended.returncode == 2 and line.count("\n") == 1
    assert line.startswith("error: torch, ") and "pip install -r requirements.txt" in line
