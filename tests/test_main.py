"""The main job at a small scale on the pocket checkpoints, and every bad input it must refuse in one line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinystories
from eval.run.options import POCKET, PRESETS, RunConfig, flags, read_config
from eval.run.saved import load_twist
from eval.run.steps import Progress
from main import main
from tinystories.errors import InputError

SMALL = [
    *("--method", "distilled", "--generations", "1"),
    *("--ctl-updates", "4", "--ctl-batch-size", "20", "--particles", "10", "--distill-runs", "4"),
    *("--distill-updates", "3", "--distill-batch-size", "8", "--eval-runs", "3", "--eval-particles", "6"),
    *("--eval-base-samples", "40"),
]


def run_main(*arguments: object) -> None:
    """The main job at the small scale."""
    main([*SMALL, *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The directory of one finished small run."""
    out = tmp_path_factory.mktemp("runs") / "small"
    run_main("--out", out)
    return out


def test_results_hold_the_promised_rows(finished):
    results = json.loads((finished / "results.json").read_text())
    assert set(results) == {"prompt", "potential", "base", "target", "generations"}
    assert {"toxicity", "similarity"} <= results["base"].keys()
    assert {"toxicity", "similarity", "log_z", "num_samples"} <= results["target"].keys()
    assert [row["generation"] for row in results["generations"]] == [0, 1]
    for row in results["generations"]:
        keys = {"toxicity", "similarity", "kl_target_proposal", "log_z_hat_mean", "log_z_hat_std", "ess", "distinct"}
        assert keys <= row.keys()
        assert 0 <= row["toxicity"] <= 1 and -1 <= row["similarity"] <= 1
        assert row["kl_target_proposal"] > 0 and row["num_sequences"] == 18
        assert 1 <= row["ess"] <= 6 and 1 / 6 <= row["distinct"] <= 1
    assert results["target"]["toxicity"] > 0.5 > 0.1 > results["base"]["toxicity"]


def test_every_file_of_a_run_can_be_read_again(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["seed"] == 0 and config["ctl"]["updates"] == 4 and "torch" in config["versions"]
    metrics = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert sum(record["phase"] == "twist learning" for record in metrics) == 8
    learning, drawing = {"twist learning", "distillation"}, {"sampling", "evaluation", "base samples", "bare model"}
    assert {record["phase"] for record in metrics} == learning | drawing
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert sum(row["source"] == "generation 1" for row in samples) == 18
    assert all(row["text"].startswith("Once upon a time, there was a") for row in samples)
    for name in ("similarity-toxicity", "twist-learning", "toxicity-histogram"):
        assert (finished / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in finished.rglob(".*")] == [".lock"], "a temporary file was left behind"


def test_a_saved_generation_loads_here_and_in_transformers(finished):
    model, tokenizer = tinystories.load(finished / "generation-1")
    twist = load_twist(finished / "generation-1")
    theirs = AutoModelForCausalLM.from_pretrained(finished / "generation-1", dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl who was mean."
    ids = torch.tensor([tokenizer.encode(text).ids])
    assert AutoTokenizer.from_pretrained(finished / "generation-1")(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
        assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()
        assert twist(model.hidden(ids)).shape == ours.shape
    base, _ = tinystories.load(POCKET / "lm")
    assert not torch.equal(base.wte.weight, model.wte.weight), "distillation changed nothing"


def test_the_same_seed_gives_the_same_numbers_and_another_seed_does_not(finished, tmp_path):
    run_main("--out", tmp_path / "again")
    run_main("--out", tmp_path / "other", "--seed", 1)
    first, again, other = (
        json.loads((p / "results.json").read_text()) for p in (finished, *sorted(tmp_path.iterdir()))
    )
    assert first == again
    assert first["generations"] != other["generations"] and first["target"] == other["target"]


def test_lora_trains_only_query_and_value(tmp_path):
    run_main("--out", tmp_path / "lora", "--lora")
    model, _ = tinystories.load(tmp_path / "lora" / "generation-1")
    base, _ = tinystories.load(POCKET / "lm")
    before = base.state_dict()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"h.{i}.attn.{p}.weight" for i in range(len(base.h)) for p in ("q_proj", "v_proj")}


def test_other_options_draw_their_own_target(tmp_path):
    run_main(
        "--out", tmp_path / "mild", "--generations", 0, "--beta", 0.1, "--eval-target-proposals", 300, "--length", 6
    )
    results = json.loads((tmp_path / "mild" / "results.json").read_text())
    assert json.loads((tmp_path / "mild" / "target" / "target.json").read_text())["key"]["length"] == 6
    assert results["target"]["num_samples"] > 50 and len(results["generations"]) == 1


def expect_refusal(capsys, arguments: list, *parts: str) -> None:
    """Exit code 2 and one line on standard error, besides what is being loaded, that holds every part."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("loading ")]
    assert ended.value.code == 2
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--beta", -1], ["--beta", "at least 0"]),
        (["--beta", "nan"], ["--beta", "at least 0"]),
        (["--beta", "inf"], ["--beta", "finite"]),
        (["--particles", 0], ["--particles", "at least 1"]),
        (["--ess-threshold", 2], ["--ess-threshold", "at most 1"]),
        (["--preset", "huge"], ["--preset", "pocket"]),
        (["--particels", 5], ["--particels", "--help"]),
        (["--particles", 10**20], ["--particles", "at most 1000000000"]),
        (["--ctl-hidden-units", 10**20], ["--ctl-hidden-units", "at most 1000000000"]),
        (["--eval-particles", 10**8], ["--eval-particles", "GB", "lower it"]),
        (["--pool-hidden-units", 10**6], ["--pool-hidden-units", "GB", "lower it"]),
        (["--pool-batch-size", 10**7], ["--pool-batch-size", "GB", "lower it"]),
        (["--method", "distilled", "--particles", 10**8], ["--particles", "GB", "lower it"]),
        (["--method", "distilled", "--ctl-hidden-units", 10**6], ["--ctl-hidden-units", "GB", "lower it"]),
        (["--lora"], ["--method pooled has no use for --lora", "--method distilled"]),
        (["--method", "distilled", "--pool-draws", 5], ["--method distilled has no use for --pool", "--method pooled"]),
        (["--prompt", ""], ["the prompt is empty"]),
        (["--prompt", "a " * 200], ["the prompt (", "shorten"]),
        (["--length", 500], ["the length (500)", "shorten"]),
        (["--lm", "no/such/place"], ["no/such/place", "--lm"]),
        (["--device", "abacus"], ["--device", "cpu"]),
        (["--preset", "paper"], ["TinyStories-33M", "--lm"]),
    ],
)
def test_bad_options_are_refused(capsys, tmp_path, arguments, parts, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    expect_refusal(capsys, ["--out", tmp_path / "run", *arguments], *parts)
    assert not (tmp_path / "run").exists(), "nothing is written for a run that cannot start"


def test_an_output_directory_that_exists_is_left_alone(capsys, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    expect_refusal(capsys, ["--out", tmp_path], "--out", "exists")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_an_unwritable_output_directory_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    expect_refusal(capsys, ["--out", tmp_path / "file" / "run"], "--out", "cannot be written")


@pytest.fixture
def copied(tmp_path) -> Path:
    """A copy of the pocket checkpoints that a test may damage."""
    shutil.copytree(POCKET, tmp_path / "pocket")
    return tmp_path / "pocket"


def damage(path: Path, how: str) -> None:
    """Truncate a file, overwrite part of its data with NaN, or remove it."""
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "tampered":
        data[-4000:] = b"\xff" * 4000
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "tampered", "missing"])
@pytest.mark.parametrize(
    ("role", "flag"), [("lm", "--lm"), ("toxicity", "--toxicity-model"), ("similarity", "--similarity-model")]
)
def test_damaged_weights_are_refused(capsys, tmp_path, copied, role, flag, how):
    damage(copied / role / "model.safetensors", how)
    expect_refusal(capsys, ["--out", tmp_path / "run", flag, copied / role], f"{role}/model.safetensors")


def test_a_config_that_contradicts_the_weights_names_the_tensor(capsys, tmp_path, copied):
    path = copied / "lm" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 100}))
    expect_refusal(capsys, ["--out", tmp_path / "run", "--lm", copied / "lm"], "c_fc", "shape")


def test_a_stale_target_is_refused(capsys, tmp_path, copied, monkeypatch):
    path = copied / "target" / "target.json"
    raw = json.loads(path.read_text())
    raw["key"]["toxicity"] = "0" * 64
    path.write_text(json.dumps(raw))
    preset = PRESETS["pocket"]
    monkeypatch.setitem(
        PRESETS, "pocket", type(preset)(preset.lm, preset.toxicity_model, preset.similarity_model, path.parent)
    )
    expect_refusal(
        capsys, ["--out", tmp_path / "run", "--eval-base-samples", 40], "target.json", "stale", "eval.pocket target"
    )


def test_as_published_is_the_papers_rule():
    config = read_config(["--as-published"], "")[0]
    assert (config.method, config.resampling, config.ess_threshold, config.moves) == (
        "distilled",
        "multinomial",
        1.0,
        0,
    )
    config = read_config([], "")[0]
    assert (config.method, config.resampling, config.ess_threshold, config.moves) == ("pooled", "systematic", 0.0, 1)
    with pytest.raises(InputError, match="--as-published sets --ess-threshold itself"):
        read_config(["--as-published", "--ess-threshold", "0.5"], "")


def test_every_option_has_help():
    for _, flag, item in flags(RunConfig):
        assert len(item.metadata["help"]) > 2, flag


def test_the_paper_trains_with_its_own_number_of_particles():
    assert read_config(["--preset", "paper"], "")[0].particles == 100
    small = ["--preset", "paper", "--method", "distilled", "--particles", "7"]
    assert read_config(small, "")[0].particles == 7
    assert read_config([], "")[0].particles == RunConfig().particles == 50


POOLED = [
    *("--generations", "1", "--pool-base-draws", "40", "--pool-draws", "20", "--pool-rounds", "1"),
    *("--pool-updates", "3", "--pool-batch-size", "8"),
    *("--eval-runs", "3", "--eval-particles", "6", "--eval-base-samples", "20"),
]


WORK = {  # of the phases of POOLED and SMALL, a particle that is moved counting twice
    "base samples": {20, 40},
    "target by rejection": {70},
    "round": {40, 20},
    "sampling": {80},
    "distillation": {36},
    "twist learning": {0.6 * 3 * 8, 1.7 * 4 * 20},
    "evaluation": {36},
    "bare model": {40},
}


@pytest.mark.parametrize("options", [SMALL, POOLED])
@pytest.mark.parametrize("prompts", [[], ["--prompt", "The cat", "--prompt", "The dog"]])
def test_the_plan_of_a_run_names_every_phase_in_its_order(tmp_path, capsys, monkeypatch, options, prompts):
    """Every phase says its number as it ends, and has its own work; the time to go is that of a plan in sequences."""
    monkeypatch.setattr("eval.run.steps.time.monotonic", iter(range(10**6)).__next__)
    show, phases = Progress.show, []

    def shown(progress: Progress, bar) -> None:
        show(progress, bar)
        if progress.done == progress.total:
            phases.append((progress.phase, progress.directory.plan[progress.number - 1]))

    monkeypatch.setattr(Progress, "show", shown)
    potential = ["--potential", "regex:[a-z]", "--eval-target-proposals", "70"] if prompts else []
    main([*options, *prompts, *potential, "--out", str(tmp_path / "run")])
    last = [line for line in capsys.readouterr().err.splitlines() if re.search(r"  (\d+)/\1  ", line)]
    places = [re.match(r"(\d+)/(\d+)", line).groups() for line in last]
    assert places == [(str(number), str(len(last))) for number in range(1, len(last) + 1)]
    assert all(re.match(r"\S+, \d+ (s|min) to go  ", line) for line in last[:-1]) and "to go" not in last[-1]
    for phase, work in phases:
        assert work in WORK[re.sub(r" (prompt-)?\d+", "", phase)], phase
    assert len(phases) == len(last) and any(phase.startswith("target") for phase, _ in phases) == bool(prompts)


def test_a_quiet_run_says_nothing_but_its_table(tmp_path, capfd, finished):
    run_main("--quiet", "--out", tmp_path / "run")
    said = capfd.readouterr()
    assert said.err == "" and "Generation 1" in said.out
    assert (tmp_path / "run" / "results.json").read_bytes() == (finished / "results.json").read_bytes()
    main(["--resume", str(tmp_path / "run"), "--quiet"])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("options", [SMALL, POOLED])
def test_a_run_of_the_papers_size_says_first_what_it_takes(tmp_path, capsys, options):
    """Time and memory stand before the first phase, and measuring them changes no sample."""
    networks = {"--lm": "lm", "--toxicity-model": "toxicity", "--similarity-model": "similarity"}
    places = [word for option, name in networks.items() for word in (option, str(POCKET / name))]
    sizes = [*options, *places, "--preset", "paper", "--eval-target-proposals", "50"]
    main([*sizes, "--out", str(tmp_path / "told")])
    said = capsys.readouterr().err.splitlines()
    estimate = next(i for i, line in enumerate(said) if re.fullmatch(r"about \d+ (s|min) in all.*from a few.*", line))
    assert estimate < next(i for i, line in enumerate(said) if "target by rejection" in line)
    if Path("/proc/self/status").exists():
        assert 0.1 < float(re.search(r"([\d.]+) GB of memory \(", said[estimate])[1]) < 20
    main([*sizes, "--quiet", "--out", str(tmp_path / "quiet")])
    assert "about" not in capsys.readouterr().err
    told, quiet = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("told", "quiet"))
    assert told == quiet
