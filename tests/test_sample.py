"""`python -m tsmc`: what it prints is what was sampled, and everything that can go wrong is said in one line."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from worlds import generator

import tinystories
from eval.run import setup as parts
from eval.run.command import one_line_errors, printable
from eval.run.options import POCKET, RunConfig, saved_config
from eval.run.saved import generations, load_generation, save_twist
from eval.run.setup import load_setup
from eval.viewer import __main__ as sample
from eval.viewer.draws import choose, draw
from eval.viewer.terminal import columns, tail
from eval.viewer.watch import Watch
from tinystories.checkpoint import write_json
from tsmc import SCHEMES, Chunks, Population, Trace, proposal_log_probs
from tsmc.scoring import sequence_log_probs
from tsmc.weights import effective_sample_size, log_mean_exp, normalise
from twist import TwistMLP

ROOT = Path(__file__).parents[1]
T = 5
PROMPT = "Once upon a time, there was a"
OTHER = "The ugly dog said"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two generations with random twists; the second model differs from the first."""
    path = tmp_path_factory.mktemp("runs") / "small"
    config = RunConfig(length=T)
    write_json(path / "config.json", dataclasses.asdict(config))
    model, tokenizer = tinystories.load(POCKET / "lm")
    for m in range(2):
        source = generator(m)
        with torch.no_grad():
            model.wte.weight += 0.02 * m * torch.randn(model.wte.weight.shape, generator=source)
        twist = TwistMLP(model.config.hidden_size, 16, model.config.vocab_size, source)
        for parameter in twist.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=source)
        tinystories.save(path / f"generation-{m}", model, tokenizer)
        save_twist(path / f"generation-{m}", twist)
    return path


@pytest.fixture
def printed(run, capsys):
    """What the program prints for the small run, given further arguments."""

    def call(*arguments: object, runs: int = 1) -> str:
        sample.main([str(run), "--runs", str(runs), *map(str, arguments)])
        return capsys.readouterr().out

    return call


def test_json_accounts_for_every_particle(printed):
    record = json.loads(printed("--json", "--particles", 12, "--samples", 5, "--generation", 0))
    distinct = record["distinct"]
    weights = [row["weight"] for row in distinct]
    assert sum(weights) == pytest.approx(1) and weights == sorted(weights, reverse=True)
    assert sum(row["particles"] for row in distinct) == sum(row["copies"] for row in distinct) == 12
    assert len(record["samples"]) == 5 and all(row in distinct and row["copies"] > 0 for row in record["samples"])
    assert all(row["text"].startswith(PROMPT) and row["text"] != PROMPT for row in distinct)
    assert all(row["log_phi"] == pytest.approx(10 * math.log(row["score"]), abs=1e-3) for row in distinct)
    assert 1 <= record["ess"] <= 12 and math.isfinite(record["log_z_hat"])
    assert (record["generation"], record["length"], record["seed"]) == (0, T, 0)
    assert record["log_z_hat_mean"] == pytest.approx(record["log_z_hat"]) and record["log_z_hat_std"] is None


def test_json_tells_how_log_z_hat_varies_over_the_runs(printed):
    record = json.loads(printed("--json", "--particles", 4, "--samples", 1, runs=6))
    assert record["log_z_hat_mean"] < record["log_z_hat"], "the log of a mean exceeds the mean of logs"
    assert record["log_z_hat_std"] > 0


@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize("prompt", [PROMPT, OTHER])
def test_without_resampling_the_weights_are_those_of_the_target(run, m, prompt):
    config = dataclasses.replace(saved_config(run), prompt=(PROMPT, OTHER))
    setup = load_setup(config)
    sigmas, twist = load_generation(setup, generations(run)[m], m, torch.device("cpu"))
    its, sigma = setup.problems[config.prompt.index(prompt)], sigmas[config.prompt.index(prompt)]
    rule = {"resample": SCHEMES["multinomial"], "ess_threshold": 0.0}
    drawn, _ = draw(its, sigma, twist, 9, 9, generator(0), Trace(), Chunks(0, 1, generator), **rule)
    tokens = drawn.population.tokens[0]
    log_p = sequence_log_probs(its.base, tokens)
    log_phi = config.beta * its.log_toxicity(its.potential.texts(tokens))
    log_w = log_p + log_phi - proposal_log_probs(sigma.model, twist, tokens)[1]
    assert all(text.startswith(prompt) for text in its.potential.texts(tokens))
    assert drawn.population.log_z.item() == pytest.approx(log_mean_exp(log_w).item(), abs=1e-3)
    assert drawn.population.ess.item() == pytest.approx(effective_sample_size(log_w).item(), rel=1e-3)
    heaviest = its.potential.texts(tokens)[log_w.argmax()]
    assert drawn.distinct[0].text == heaviest
    same = torch.tensor([text == heaviest for text in its.potential.texts(tokens)])
    assert drawn.distinct[0].weight == pytest.approx(normalise(log_w)[same].sum().item(), abs=1e-3)


@pytest.mark.parametrize("scheme", ["multinomial", "systematic"])
def test_samples_are_the_last_resampling_in_random_order(run, scheme):
    setup = load_setup(saved_config(run))
    (sigma,), twist = load_generation(setup, generations(run)[0], 0, torch.device("cpu"))
    rule = {"resample": SCHEMES[scheme], "ess_threshold": 0.5}
    drawn, _ = draw(setup.problems[0], sigma, twist, 20, 20, generator(3), Trace(), Chunks(0, 1, generator), **rule)
    copies = {place: row.copies for place, row in enumerate(drawn.distinct) if row.copies}
    assert {place: drawn.samples.count(place) for place in set(drawn.samples)} == copies
    final = setup.problems[0].potential.texts(drawn.population.samples[0])
    assert sorted(drawn.distinct[place].text for place in drawn.samples) == sorted(final)
    assert [drawn.distinct[place].text for place in drawn.samples] != final


def test_runs_are_pooled_by_their_evidence(run):
    setup = load_setup(saved_config(run))
    (sigma,), twist = load_generation(setup, generations(run)[0], 0, torch.device("cpu"))
    rule = {"resample": SCHEMES["systematic"], "ess_threshold": 0.0}
    trace, others = Trace(), Chunks(5, 2, lambda chunk: generator(chunk + 10))
    shown, pooled = draw(setup.problems[0], sigma, twist, 6, 6, generator(0), trace, others, **rule)
    assert shown.population.log_z.shape == (1,) and pooled.population.log_z.shape == (6,)
    assert pooled.population.log_mean_z() == pytest.approx(log_mean_exp(pooled.population.log_z).item(), abs=1e-4)
    log_weights = pooled.population.log_weights.flatten().double()  # without resampling all are of one kind
    wanted = {}
    texts = setup.problems[0].potential.texts(pooled.population.tokens.flatten(0, 1))
    for text, weight in zip(texts, log_weights.softmax(0).tolist(), strict=True):
        wanted[text] = wanted.get(text, 0) + weight
    assert {row.text: row.weight for row in pooled.distinct} == pytest.approx(wanted, abs=1e-5)
    assert sum(row.copies for row in pooled.distinct) == 36 and len(pooled.samples) == 6


def test_samples_of_many_runs_occur_as_often_as_their_weight_says():
    """Two runs of evidence 3 : 1, each of one sequence: 3/4 of the samples are the first's."""
    place = torch.tensor([[0, 0], [1, 1]])
    log_z, ancestors = torch.tensor([3.0, 1.0]).log(), torch.zeros(2, 2, dtype=torch.long)
    population = Population(
        torch.zeros(2, 2, 1), *[torch.zeros(2, 2)] * 2, ancestors, torch.zeros(2, 2, 1), log_z, torch.ones(2)
    )
    chosen = [drawn for seed in range(2000) for drawn in choose(population, place, 2, generator(seed))]
    assert abs(chosen.count(0) / 4000 - 0.75) < 4 * (0.75 * 0.25 / 4000) ** 0.5


def test_the_length_and_the_prompt_may_differ_from_the_run_s_own(printed):
    text = printed("--particles", 4, "--length", 3, OTHER, runs=2)
    assert "2 runs of K = 4, T = 3" in text and "trained on another prompt" in text
    assert "trained on another prompt" not in printed("--particles", 4)


def test_another_potential_weighs_the_same_proposals(printed):
    """At the last token alone the potential counts: without resampling before it the same sequences come out."""
    options = ("--json", "--particles", 30, "--ess-threshold", 0)
    own, other = (json.loads(printed(*options, *more)) for more in ((), ("--potential", "keyword~2:a")))
    assert {row["text"] for row in own["distinct"]} == {row["text"] for row in other["distinct"]}
    assert {round(row["log_phi"], 5) for row in other["distinct"]} == {0.0, -2.0}
    for row in other["distinct"]:
        assert (row["log_phi"] == 0) == bool(re.search(r"\ba\b", row["text"].removeprefix(PROMPT)))


def test_the_seed_and_the_prompt_decide(printed):
    options = "--json", "--particles", 6
    one, two = printed(PROMPT, OTHER, *options).splitlines()
    assert printed(*options).splitlines() == [one], "the run's own prompt, whatever else was asked for"
    assert printed(*options, OTHER).splitlines() == [two]
    assert printed(*options, "--seed", 1).splitlines() != [one]
    assert json.loads(one)["generation"] == 1, "the last generation unless another is named"
    assert json.loads(printed(*options, "--generation", 0))["log_z_hat"] != json.loads(one)["log_z_hat"]


def test_several_generations_are_what_each_is_alone(printed, tmp_path):
    prompts, options = (PROMPT, OTHER), ("--json", "--particles", 6, "--generation")
    page = tmp_path / "page.html"
    lines = printed(*prompts, *options, 1, 0, 1, "--html", page).splitlines()
    assert lines == [line for m in (1, 0) for line in printed(*prompts, *options, m).splitlines()]
    assert [json.loads(line)["generation"] for line in lines] == [1, 1, 0, 0]
    data = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL).group(1)
    populations = json.loads(data)["populations"]
    assert [(one["generation"], one["prompt"]) for one in populations] == [
        (m, prompt) for m in (1, 0) for prompt in prompts
    ]
    log_z_hat = [json.loads(line)["log_z_hat"] for line in lines]
    assert [one["log_z_hat"][-1] for one in populations] == pytest.approx(log_z_hat, abs=1e-3)


def test_several_generations_are_printed_under_their_numbers(printed):
    options = ("--particles", 4, "--generation")
    alone = [printed(*options, m) for m in (0, 1)]
    assert printed(*options, 0, 1) == f"Generation 0\n\n{alone[0]}\nGeneration 1\n\n{alone[1]}"


def test_the_table_shows_each_drawn_sequence_once(printed):
    lines = printed("--particles", 8, "--samples", 8).splitlines()
    record = json.loads(printed("--particles", 8, "--samples", 8, "--json"))
    assert lines[0] == PROMPT and f"log Z-hat {record['log_z_hat']:.2f}   ESS {record['ess']:.1f} of 8" in lines[2]
    rows = [line.split(maxsplit=4) for line in lines[4:]]
    assert sum(int(row[0]) for row in rows) == 8
    assert [row[4] for row in rows] == [row["text"] for row in record["distinct"] if row["copies"]]
    weights = [float(row[1]) for row in rows]
    assert weights == sorted(weights, reverse=True)


@pytest.fixture
def dead(monkeypatch):
    """A potential that is zero everywhere."""
    monkeypatch.setattr(
        parts.toxicity.ToxicityScorer, "__call__", lambda self, texts: torch.full((len(texts),), -torch.inf)
    )


def test_a_dead_population_is_said_in_words(printed, dead):
    words = printed("--particles", 4)
    assert "weight zero" in words and "log Z-hat -inf" in words and "drawn" not in words

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads(printed("--json", "--particles", 4), parse_constant=refuse)
    assert record["log_z_hat"] is None and record["samples"] == [] and record["ess"] == 0
    assert record["log_z_hat_mean"] is None
    assert all(row["log_phi"] is None for row in record["distinct"])


def test_watching_shows_every_step_and_changes_nothing(printed):
    options = ("--particles", 15, "--resampling", "multinomial", "--ess-threshold", 1)
    plain, text = printed(*options), printed(*options, "--watch")
    assert text.endswith(plain) and "\x1b" not in text
    blocks = text.removesuffix(plain).strip().split("\n\n" + PROMPT + "\n")
    assert len(blocks) == T
    for t, block in enumerate(blocks, start=1):
        assert f"step {t} of {T}   ESS " in block and "and 5 more of weight 0." in block
        assert "resampled: " in block and ("copied: " in block) == any(f" x {n}" in block for n in range(2, 16))


def watch_one_step(tokens: torch.Tensor, ancestors: list[int], **changes) -> Watch:
    """A watch that has seen one step of particles with weights 1, 2, 3, ..."""
    _, tokenizer = tinystories.load(POCKET / "lm")
    watch = Watch("Hello", tokenizer, 2, 0.0)
    for name, value in changes.items():
        setattr(watch, name, value)
    log_w = torch.arange(1.0, len(tokens) + 1).log()[None]
    log_psi = torch.tensor([[-1.0, 1.0] * len(tokens)])[:, : len(tokens)]
    weights = {
        "log_psi": log_psi,
        "log_w": log_w,
        "log_weights": log_w,
        "ess": effective_sample_size(log_w),
        "log_z": 0.0,
    }
    watch(types.SimpleNamespace(tokens=tokens[None, :, None], **weights), torch.tensor([ancestors]))
    return watch


def test_a_step_lists_the_heaviest_particles_and_who_was_copied(capsys):
    watch_one_step(torch.arange(20, 24), [3, 3, 2, 3])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "step 1 of 2   ESS 3.3 of 4   resampled: 2 continue, 2 end"
    assert lines[2] == "copied: 3 x 3"
    assert [line.split()[:6] for line in lines[5:9]] == [
        ["3", "-", "3", "1.00", "1.39", "0.400"],
        ["2", "-", "1", "-1.00", "1.10", "0.300"],
        ["1", "-", "0", "1.00", "0.69", "0.200"],
        ["0", "-", "0", "-1.00", "0.00", "0.100"],
    ]


def test_a_step_without_resampling_says_so(capsys):
    watch_one_step(torch.arange(20, 24), [0, 1, 2, 3])
    assert "every particle continues" in capsys.readouterr().out


def test_a_terminal_gets_colours_and_a_clear_screen(capsys, monkeypatch):
    monkeypatch.setenv("LINES", "9")
    watch_one_step(torch.arange(20, 24), [3, 3, 2, 3], screen=True, coloured=True)
    text = capsys.readouterr().out
    assert text.startswith("\x1b[H\x1b[2J") and "\x1b[1;38;5;208m" in text and "\x1b[1;38;5;33m" in text
    assert "and 2 more of weight 0.300 together" in text, "no more particles than the screen has lines for"


def test_texts_stay_in_their_line_and_in_their_columns():
    assert printable("a\nb\x1b[2J\u200b") == "a\\nb\\x1b[2J\\u200b"
    assert columns("日本e\u0301") == 5
    assert tail("日本語の文", 6) == "…の文" and tail("short", 5) == "short" and tail("longer", 5) == "…nger"


def expect_refusal(capsys, arguments: list, *parts: str) -> None:
    """Exit code 2 and one line on standard error, beside that of loading, that holds every part."""
    with pytest.raises(SystemExit) as ended:
        sample.main([str(argument) for argument in arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading the networks of ")]
    assert ended.value.code == 2
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--generation", 7], ["--generation 7 is not in", "; it holds 0, 1"]),
        (["--generation", 0, 7, 1], ["--generation 7 is not in", "; it holds 0, 1"]),
        (["--generation", 0, "Once"], ["'Once'", "give the run and the prompts before --generation"]),
        (["--generation", 0, 1, "--watch"], ["--watch shows a single generation", "--generation one number"]),
        (["--generation", 0, 1, "--picture", "p.png"], ["--picture shows a single generation"]),
        (["--particles", 0], ["--particles", "at least 1"]),
        (["--particles", 10**20], ["--particles", "at most 1000000000"]),
        (["--particles", 10**8], ["--particles", "GB", "lower it"]),
        (["--samples", 60], ["--samples 60", "--particles 50"]),
        (["--seed", -1], ["--seed", "at least 0"]),
        (["--delay", "nan"], ["--delay"]),
        (["--ess-threshold", 1.5], ["--ess-threshold", "at most 1"]),
        (["--resampling", "lottery"], ["--resampling", "systematic"]),
        (["--device", "abacus"], ["--device", "cpu"]),
        (["--json", "--watch"], ["--json", "--watch"]),
        (["word " * 200], ["shorten"]),
        (["fine", ""], ["empty"]),
        (["a\nb"], ["cannot be printed"]),
        (["--potential", "luck"], ["--potential luck", "keyword:WORD"]),
        (["--html", "/dev/null/page.html"], ["/dev/null/page.html", "cannot be written"]),
        (["--html", "/dev/null"], ["--html /dev/null", "choose another name"]),
        (["--picture", "/"], ["--picture /", "choose another name"]),
    ],
)
def test_bad_options_are_refused(capsys, run, arguments, parts):
    expect_refusal(capsys, [run, *arguments], *parts)


def test_a_directory_without_a_saved_pair_is_refused(capsys, tmp_path, run):
    expect_refusal(capsys, [tmp_path / "none"], "none", "no saved generation")
    expect_refusal(capsys, [POCKET / "lm"], "no saved generation")
    begun = tmp_path / "begun"
    (begun / "generation-0").mkdir(parents=True)
    (begun / "generation-0" / "model.safetensors").write_bytes((run / "generation-0/model.safetensors").read_bytes())
    expect_refusal(capsys, [begun], "no saved generation")
    (begun / "generation-0" / "twist.safetensors").write_bytes(b"half")
    expect_refusal(capsys, [begun], "config.json")


def program(run: Path, *arguments: str, **options) -> subprocess.Popen:
    """`python -m tsmc` as a process of its own."""
    command = [sys.executable, "-m", "tsmc", str(run), "--particles", "4", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


def test_a_reader_who_leaves_ends_the_program_quietly(run):
    reading, writing = os.pipe()
    os.close(reading)
    process = program(run, "--watch", stdout=writing)
    os.close(writing)
    assert process.communicate()[1] == f"loading the networks of {run}\n" and process.returncode == 141


@pytest.mark.slow
@pytest.mark.parametrize(("output", "code"), [(">&-", 0), (">/dev/full", 2), ("2>/dev/full", 0), ("| head -1", 141)])
def test_output_that_cannot_be_written_is_no_traceback(run, output, code):
    prompts = " ".join(f'"Cat {number} said"' for number in range(30))  # each printed by itself
    command = f'"{sys.executable}" -m tsmc "{run}" {prompts} --particles 2 {output}; exit "${{PIPESTATUS[0]}}"'
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == code and ended.stderr.count("\n") == (output[0] != "2") + (code == 2)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "standard output cannot be written"),
        (OSError(36, "File name too long", "runs/x"), "runs/x: cannot be used"),
    ],
)
def test_errors_of_the_system_are_told_apart(capsys, error, words):
    with pytest.raises(SystemExit) as ended, one_line_errors("sample"):
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and words in line


def test_an_encoding_without_the_characters_is_no_obstacle(run):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = program(run, "Zoë said", stdout=subprocess.PIPE, env=environment)
    out, errors = process.communicate()
    assert process.returncode == 0 and errors.count("\n") == 1 and out.startswith("Zo\\xeb said")


def test_a_page_goes_through_a_link_and_leaves_it(printed, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    printed("--particles", 4, "--html", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and "</html>" in (tmp_path / "page.html").read_text()


def test_a_twist_of_another_model_is_refused(capsys, run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    save_twist(other / "generation-1", TwistMLP(7, 16, 4096, generator(0)))
    expect_refusal(capsys, [other], "generation-1/twist.safetensors", "another language model")


def test_an_interrupt_is_quiet(capsys):
    with pytest.raises(SystemExit) as ended, one_line_errors("sample"):
        raise KeyboardInterrupt
    assert ended.value.code == 130 and capsys.readouterr().err == "sample: interrupted\n"
