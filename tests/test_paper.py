"""The study end to end at a tiny scale: its products, resuming, refusals, failures, and a report that says what was found."""

import contextlib
import csv
import dataclasses
import io
import json
import math
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
from eval.paper import __main__ as paper
from eval.paper import study
from eval.paper.claims import verdict
from eval.paper.numbers import Number, Numbers, mean_of, own_scheme
from eval.paper.report.document import templates, write_report
from eval.paper.report.figures import FIGURES
from eval.paper.study import NAMES, NEVER, StudyConfig, baseline_cost, tsmc_cost
from eval.paper.task import with_half_width
from eval.run.options import CTLConfig, DistillConfig, EvaluationConfig, PoolConfig, RunConfig
from eval.run.setup import Setup, load_setup
from tinystories import Conditional
from tsmc import SCHEMES, Chunks, Steps
from tsmc.estimate import Estimate

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
    run=dataclasses.replace(
        study.AS_PUBLISHED,
        generations=1,
        beta=0.3,
        length=5,
        rows=20,
        particles=4,
        save_every=1.0,
        pool=PoolConfig(base_draws=40, rounds=1, draws=20, updates=3, batch_size=6),
        ctl=CTLConfig(updates=4, batch_size=6),
        distill=DistillConfig(runs=4, updates=3, batch_size=4),
        eval=EvaluationConfig(particles=4, runs=3, base_samples=12),
    ),
)
FORMS = ("+.2f", "+.3f", ".0f", ".1f", ".2f", ".3f", ",.0f")
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


def is_running(out: Path) -> bool:
    """Whether some process works on a run in a study's directory."""
    return any(str(out / "runs").encode() in command for command in map(command_line, Path("/proc").glob("[0-9]*")))


def command_line(process: Path) -> bytes:
    """What a process was started with; nothing where it has ended."""
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


def wait_for(condition) -> None:
    """Until it holds, for at most five minutes."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_section_has_its_numbers(whole):
    rows = numbers_of(whole)
    keys = {(row["section"], row["name"], row["seed"], row["generation"], row["quantity"]) for row in rows}
    for name in (NAMES["tsmc"], NAMES["lora"], NAMES["no-effective"]):
        assert {("generations", name, seed, m, "kl") for seed in (1, 2, "mean") for m in (0, 1)} <= keys
    assert {("particles", f"K = {k}", "mean", 1, "toxicity") for k in (4, 6)} <= keys
    assert len({row["name"] for row in rows if row["section"] == "resampling"}) == 9
    assert {row["seed"] for row in rows if row["section"] == "best"} == {1, 2, "mean", "other seeds"}
    assert ("rejection", "beta 0", "", "", "acceptance") in keys and ("budget", "TSMC", "", "", "twist_share") in keys
    with open(whole / "results.csv", newline="") as file:
        assert [row["quantity"] for row in csv.DictReader(file)] == [row["quantity"] for row in rows]


def test_intervals_hold_their_value_and_only_what_is_possible(whole):
    least = {"probability": 0, "share": 0, "cosine": -1, "distance on the plane": 0}
    for row in numbers_of(whole):
        if row["low"] is None:
            continue
        assert row["low"] <= row["value"] <= row["high"], row
        if row["section"] != "changes":
            positive = row["quantity"] in ("kl", "kl_base", "drift", "log_z_hat_std") and row["value"] >= 0
            assert row["low"] >= (0 if positive else least.get(row["unit"], -float("inf"))), row
            assert row["high"] <= (1 if row["unit"] in ("probability", "share", "cosine") else float("inf")), row


def test_variants_share_generation_0_and_differ_behind_it(whole):
    rows = [row for row in numbers_of(whole) if (row["seed"], row["quantity"]) == (1, "kl")]
    value = {(row["name"], row["generation"]): row["value"] for row in rows}
    kinds = [NAMES[kind] for kind in ("tsmc", "no-effective", "lora")]
    assert len({value[kind, 0] for kind in kinds}) == 1 and len({value[kind, 1] for kind in kinds}) == 3


def test_the_error_of_the_exact_samples_widens_means_over_seeds(whole):
    rows = {(row["name"], row["seed"], row["quantity"]): row for row in numbers_of(whole) if row["generation"] == 1}
    for name, quantity in ((NAMES["tsmc"], "kl"), (NAMES["lora"], "kl"), (NAMES["no-effective"], "drift")):
        alone = mean_of([rows[name, seed, quantity]["value"] for seed in (1, 2)])
        mean = rows[name, "mean", quantity]
        assert mean["value"] == alone["value"] and mean["high"] > alone["high"]


def test_what_stands_beside_the_runs_has_the_first_seeds_only():
    names = {part.name for part in study.study_parts(StudyConfig(seeds=(1, 2, 3), seeds_beside=2), True)}
    assert {"tsmc-3", "late-3", "pooled-3", "particles-3", "lora-2", "resampling-2", "dpo-full-best-2"} <= names
    assert names.isdisjoint({"lora-3", "no-effective-3", "resampling-3", "dpo-full-best-3"})


def test_one_seed_beside_two_makes_a_report_that_says_so(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "study")
    fewer = dataclasses.replace(TINY, seeds_beside=1)
    write_report(fewer, study.study_parts(fewer, False), tmp_path / "study", "a command")
    page = " ".join((tmp_path / "study" / "report.html").read_text().split())
    assert "have the first 1 of the seeds" in page and "have the first" not in (whole / "report.html").read_text()
    both, one = (
        {(r["name"], r["seed"], r["generation"], r["quantity"]): r for r in numbers_of(out)}
        for out in (whole, tmp_path / "study")
    )
    lora, tsmc = ((NAMES[name], "mean", 1, "kl") for name in ("lora", "tsmc"))
    assert one[lora]["value"] == one[NAMES["lora"], 1, 1, "kl"]["value"] != both[lora]["value"]
    assert one[tsmc] == both[tsmc] and (NAMES["lora"], 2, 1, "kl") not in one
    change = f"TSMC to {NAMES['lora']}"
    assert one[change, "mean", "", "kl"]["value"] == pytest.approx(both[change, 1, "", "kl"]["value"])


def test_means_are_over_the_seeds_that_ran_it_and_none_where_one_diverged():
    numbers = Numbers()
    for name, seed, distance in (("A", 1, 0.1), ("A", 2, 0.2), ("A", 3, 0.9), ("B", 1, 0.3), ("B", 2, 0.6)):
        numbers.add(("best", name, seed, ""), "distance", distance)
    numbers.add(("best", "C", 1, ""), "distance", 0.5)
    numbers.add(("best", "C", 2, ""), "learning_rate", 0.001)  # of a run that diverged
    numbers.average("best", (1, 2, 3))
    means = {name: numbers.get(("best", name, "mean", ""), "distance") for name in "ABC"}
    assert (means["A"].value, means["B"].value, means["C"]) == (pytest.approx(0.4), pytest.approx(0.45), None)
    assert (means["A"].seeds, means["B"].seeds) == (3, 2)
    paired = tuple([("best", name, seed, "") for seed in (1, 2)] for name in "AB")
    numbers.add_changes("A to B", ("distance",), *paired)
    assert numbers.changed("A to B", "distance").value == pytest.approx(0.3)


def test_an_error_that_all_seeds_share_is_added_once():
    numbers, source = Numbers(), torch.Generator().manual_seed(0)
    numbers.log_sigma = torch.randn(50, generator=source, dtype=torch.float64)
    numbers.log_z = Estimate(0.0, 0.3, 1e6)
    values = [2.0, 2.1, 1.9, 2.0]
    for seed, value in enumerate(values):
        numbers.add(("generations", "TSMC", seed, 0), "kl", value)
        numbers.log_density["generations", "TSMC", seed, 0, "kl"] = torch.zeros(50, dtype=torch.float64)
    numbers.average("generations", (0, 1, 2, 3))
    mean = numbers.get(("generations", "TSMC", "mean", 0), "kl")
    alone, shared = mean_of(values), (numbers.log_sigma.var().item() / 50 + 0.3**2) ** 0.5
    half = ((alone["high"] - alone["value"]) ** 2 + (1.96 * shared) ** 2) ** 0.5
    factor = math.exp(half / mean.value)  # of a positive quantity the interval is that of its logarithm
    assert mean.value == alone["value"]
    assert (mean.low, mean.high) == pytest.approx((mean.value / factor, mean.value * factor), rel=1e-3)


@pytest.mark.parametrize(("value", "half"), [(0.02, 0.01), (0.5, 0.4), (0.97, 0.02), (1e-6, 9e-7)])
def test_an_interval_holds_only_what_is_possible(value, half):
    """A narrow one is the plain one, a wide one bends before the limits, and either limit mirrors the other."""
    share, mirrored = with_half_width(value, half, 0, 1), with_half_width(1 - value, half, 0, 1)
    assert 0 < share["low"] < value < share["high"] < 1
    assert (1 - share["high"], 1 - share["low"]) == pytest.approx((mirrored["low"], mirrored["high"]), abs=1e-9)
    positive, negative = with_half_width(value, half, lowest=0), with_half_width(-value, half, highest=0)
    assert positive["low"] > 0 and positive["low"] * positive["high"] == pytest.approx(value**2)
    assert (-positive["high"], -positive["low"]) == pytest.approx((negative["low"], negative["high"]))
    narrow = with_half_width(value, 1e-4 * value * (1 - value), 0, 1)
    assert narrow["high"] - narrow["low"] == pytest.approx(2e-4 * value * (1 - value), rel=1e-3)
    assert with_half_width(-0.1, half, lowest=0)["low"] == -0.1 - half, "an estimate outside has the plain interval"


def test_an_interval_that_reaches_a_limit_says_so():
    """So that what is seen does not depend on the scale: the lower end is above zero only where the plain one is."""
    assert with_half_width(0.1, 3.0, lowest=0) == {"value": 0.1, "low": 0.0, "high": 3.1}
    assert with_half_width(1.0, 0.1, 0, 1) == {"value": 1.0, "low": 0.9, "high": 1.0}
    assert with_half_width(0.3, 0.29, lowest=0)["low"] > 0


def printed(report: str) -> str:
    """The report's text above the texts of the samples: tables and prose, but not figures."""
    html = report[report.index("<main>") : report.index('<section id="texts"')]
    return re.sub(r"<[^>]+>|\s+", " ", re.sub(r"<img [^>]+>", "", html)).replace("−", "-")


def test_every_number_of_the_report_is_in_the_results(whole):
    """In tables and in prose; what is left are settings of the study, and numbers of figures and tables of the paper."""
    values = [row[key] for row in numbers_of(whole) for key in ("value", "low", "high") if row[key] is not None]
    known = {
        f"{sign * factor * value:{form}}" for value in values for factor in (1, 100) for sign in (1,) for form in FORMS
    }
    known |= {form.lstrip("-") for form in known if not float(form.replace(",", ""))}
    text = printed((whole / "report.html").read_text())
    run = TINY.run
    settings = {95, 1, 2, 3, 0, 0.5, run.beta, run.eval.particles, TINY.resampling_runs, TINY.similarity_samples}
    settings |= {*TINY.particle_counts, *TINY.learning_rates, 1e-2, 0.04, *map(TINY.runs_of, TINY.particle_counts)}
    numbers = re.findall(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?![\w.]*\w)", text)
    unknown = [number for number in numbers if number not in known and float(number.replace(",", "")) not in settings]
    assert len(numbers) > 400 and not unknown, unknown


def test_the_report_is_complete_in_itself(whole):
    report = (whole / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|\#)""", report) and "@import" not in report
    assert report.count("data:image/svg+xml") == 2 * len(FIGURES) and report.count("<section") == 9
    for target in re.findall(r'href="#(.*?)"', report):
        assert f'id="{target}"' in report
    for table in re.findall(r"<table>(.*?)</table>", report, re.DOTALL):
        widths = {len(re.findall(r"<t[hd][ >]", line)) for line in re.findall(r"<tr.*?</tr>", table, re.DOTALL)}
        assert len(widths) == 1, table
    for name in (figure.__name__.replace("_", "-") for figure in FIGURES):
        assert (whole / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for name in ("similarity-toxicity", "toxicity-kl"):
        drawn = (whole / "figures" / f"{name}.svg").read_text()
        assert all(f"<!-- {label} -->" in drawn for label in ("Base", "Pooled twist", "GRPO, LoRA"))


def test_texts_cannot_break_the_page():
    macros = templates(TINY, Numbers()).get_template("macros.html").module
    html = macros.texts("", [{"toxicity": 0.5, "text": "a <script>x</script>\n& so"}])
    assert "&lt;script&gt;" in html and "<script>" not in html and "\\n&amp; so" in html


def test_kills_at_any_moment_change_nothing(tmp_path, start, whole):
    out, source = tmp_path / "study", random.Random(0)
    moments = ("config.json", "runs/*/metrics.jsonl", "runs/*/results.json", "runs/lora-*/metrics.jsonl")
    for jobs, pattern in zip((1, 2, 3, 2), moments, strict=True):
        process = start(out, "--jobs", str(jobs))
        wait_for(lambda pattern=pattern: any(path.stat().st_size > 0 for path in out.glob(pattern)))
        time.sleep(source.random())
        process.kill()
        process.join()
    process = start(out, "--jobs", "3")
    process.join()
    assert process.exitcode == 0, Path(f"{out}.log").read_text()
    for name in PRODUCTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert {path.name for path in out.rglob(".*")} == {".lock"} and not (out / "shared").exists()
    assert not list(out.rglob("resume"))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_study_that_is_killed_leaves_no_program_running(tmp_path, start):
    out = tmp_path / "study"
    process = start(out, "--jobs", "2")
    wait_for(lambda: is_running(out))
    process.kill()
    process.join()
    wait_for(lambda: not is_running(out))


def test_ctrl_c_stops_everything_and_says_how_to_go_on(tmp_path, start):
    out = tmp_path / "study"
    process = start(out, "--jobs", "2")
    metrics = out / "runs" / "tsmc-1" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert "interrupted and saved" in (out / "logs" / "tsmc-1.log").read_text()
    assert not is_running(out)
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
    with paper.study_directory(whole, paper.description(TINY)):
        assert "another process is writing there" in refusal("--quick", "--out", str(whole))


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


def list_items(html: str) -> list[tuple[str, str]]:
    """Class and text of every item of a list."""
    items = re.findall(r'<li class="(\w+)">(.*?)</li>', html, re.DOTALL)
    return [(kind, " ".join(re.sub(r"<[^>]+>", " ", text).split()).replace("−", "-")) for kind, text in items]


def claims_of(numbers: Numbers, config: StudyConfig) -> list[tuple[str, str]]:
    """The claims of a study, those under each verdict in turn."""
    macros = templates(config, numbers).get_template("claims.html").module
    return [item for wanted in ("yes", "no", "open") for item in list_items(macros.claims(wanted))]


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ([-1.0, -1.1, -0.9], "yes", "falls from generation 0 to 1: -1.00 (-1.25 to -0.75) nats (paper: -0.941)"),
        ([1.0, 1.1, 0.9], "no", "rises from"),
        ([-1.0, 1.0, 0.1], "open", "shows no clear change"),
    ],
)
def test_claims_say_what_the_numbers_show(whole, values, kind, words):
    numbers = read_numbers(whole)
    numbers.add(("changes", "generation 0 to 1", "mean", ""), "kl", mean_of(values))
    (claim,) = [claim for claim in claims_of(numbers, TINY) if "KL(σ‖q)" in claim[1]]
    assert claim[0] == kind and words in claim[1]


def read_numbers(out: Path) -> Numbers:
    """The table of a finished study."""
    numbers = Numbers()
    for row in numbers_of(out):
        numbers.rows[row["section"], row["name"], row["seed"], row["generation"], row["quantity"]] = Number(**row)
    return numbers


@pytest.mark.parametrize(("without", "kind"), [([0.3, 0.31, 0.29], "yes"), ([0.0, 0.02, -0.01], "open")])
def test_a_rise_that_resampling_makes_is_not_credited_to_the_method(whole, without, kind):
    numbers = read_numbers(whole)
    for name in ("generation 0 to 1", f"{own_scheme(TINY)}, generation 0 to 1"):
        numbers.add(("changes", name, "mean", ""), "toxicity", mean_of([0.45, 0.46, 0.44]))
    numbers.add(("changes", f"{NEVER}, generation 0 to 1", "mean", ""), "toxicity", mean_of(without))
    (claim,) = [
        claim
        for claim in claims_of(numbers, TINY)
        if claim[1].split(maxsplit=1)[1].startswith(("Toxicity", "tell Toxicity"))
    ]
    assert (
        claim[0] == kind and "rises" in claim[1] and ("most of it is what resampling" in claim[1]) == (kind == "open")
    )


def test_claims_stand_under_their_verdict(whole):
    titles = {"yes": "Agrees", "no": "Does not agree", "open": "Cannot tell"}
    items = list_items((whole / "report.html").read_text())
    assert len(items) >= 6 and [kind for kind, _ in items] == sorted(
        (kind for kind, _ in items), key=list(titles).index
    )
    for kind, text in items:
        assert text.startswith(titles[kind])
        assert kind == "open" or not re.search("no clear change|cannot be told|not told apart", text)


def test_a_verdict_needs_an_interval_apart_from_zero():
    numbers = Numbers()
    for name, value in (("one seed", mean_of([1.0])), ("clear", mean_of([1.0, 1.1])), ("not", mean_of([1.0, -1.1]))):
        numbers.add(("changes", name, "mean", ""), "kl", value)
    assert [verdict(numbers.changed(name, "kl"), 1) for name in ("one seed", "clear", "not")] == ["open", "yes", "open"]
    assert verdict(numbers.changed("clear", "kl"), -1) == "no"
    assert verdict(numbers.changed("clear", "kl"), 1, numbers.changed("not", "kl")) == "open"


@pytest.mark.parametrize("method", study.METHODS)
def test_baselines_spend_what_algorithm_1_spends(method):
    pocket = study.STUDIES["pocket"]
    budget = tsmc_cost(pocket.run).units(20)
    for config in pocket.grid(method):
        spent = baseline_cost(method, config).units(20)
        assert budget - spent / config.updates < spent <= budget


class Plain:
    """Stands in for `Experiment`: its phases are bare loops."""

    def __init__(self, config: RunConfig, setup: Setup):
        self.config, self.setup, self.generator = config, setup, config.generator

    def steps(self, name: str, m: int, total: int, **state: object) -> Steps:
        return Steps(total, name)

    def run_chunks(self, name: str, m: int, problem: object, particles: int, runs: int) -> Chunks:
        return Chunks(runs, self.config.rows // particles, self.config.streams(name, m))

    def resampling(self) -> dict:
        return {"resample": SCHEMES[self.config.resampling], "ess_threshold": self.config.ess_threshold}

    def note_held_out(self, m: int, before: float, after: float) -> None:
        pass


@pytest.mark.parametrize("effective", [True, False])
def test_the_budget_is_what_algorithm_1_asks_of_the_language_model(monkeypatch, effective):
    config, asked = dataclasses.replace(TINY.run, generations=2, effective_potential=effective), []
    decoder, log_probs = Conditional.decoder, Conditional.log_probs

    def counted_decoder(self, rows: int):
        asked.append(rows * (self.length - 1))
        return decoder(self, rows)

    def counted_log_probs(self, tokens: torch.Tensor):
        asked.append((3 if torch.is_grad_enabled() else 1) * len(tokens) * (self.length - 1))
        return log_probs(self, tokens)

    run = Plain(config, load_setup(config))
    monkeypatch.setattr(Conditional, "decoder", counted_decoder)
    monkeypatch.setattr(Conditional, "log_probs", counted_log_probs)
    monkeypatch.setattr(main, "held_out_loss", lambda models, held_out: 0.0)  # evaluation
    sigmas = run.setup.sigmas()
    p, psi = run.setup.model, main.contrastive_twist_learning(run, sigmas, 0)
    for m in (1, 2):
        p = main.distil(run, p, sigmas, main.draw_samples(run, sigmas, psi, m), m)
        sigmas = run.setup.sigmas(p)
        psi = main.contrastive_twist_learning(run, sigmas, m)
    assert sum(asked) == tsmc_cost(config).units(config.length)
