"""What a run writes and reads: exact samples of the target, whole files, progress, summaries."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

import main
from eval import summary
from eval.run.options import POCKET, RunConfig
from eval.run.phases import Progress
from eval.run.run import new_directory
from eval.run.target import TargetKey, load_target, save_target
from tinystories.checkpoint import digest_of, replacing, write_json, write_tensors, write_text
from tinystories.errors import InputError
from tsmc import ExactSamples

KEY = TargetKey("a" * 64, "b" * 64, "Once", 3, 10.0)
TOKENS = torch.tensor([[1, 2, 3], [3, 2, 1]])
TARGET = ExactSamples(TOKENS, torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04)


@pytest.fixture
def saved(tmp_path):
    """A directory with exact samples."""
    save_target(tmp_path, TARGET, KEY, seed=0)
    return tmp_path


def change(path, **values):
    """Change values of a JSON file; None removes one."""
    raw = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: raw[name] for name in raw if raw[name] is not None}))


def test_a_target_survives_its_files(saved):
    again = load_target(saved, KEY, 9)
    assert torch.equal(again.tokens, TARGET.tokens) and torch.equal(again.log_phi, TARGET.log_phi)
    assert (again.num_proposals, again.log_z, again.log_z_std_error) == (900, -7.5, 0.04)


def test_a_target_of_another_sigma_is_passed_over_and_of_other_checkpoints_refused(saved):
    for other in ({"beta": 1.0}, {"length": 4}, {"prompt": "Two"}, {"potential": ["regex:a"]}):
        assert load_target(saved, dataclasses.replace(KEY, **other), 9) is None
    for role in ("lm", "toxicity"):
        with pytest.raises(InputError, match=f"stale, it was made for another {role} checkpoint"):
            load_target(saved, dataclasses.replace(KEY, **{role: "c" * 64}), 9)


@pytest.mark.parametrize(
    "values",
    [
        {"key": {"lm": "a", "more": 1}},
        {"num_samples": -2},
        {"num_proposals": 1},
        {"log_z": None},
        {"log_z": math.nan},
        {"log_z_std_error": -0.1},
        {"log_z_std_error": 10**400},
    ],
)
def test_impossible_values_in_a_target_are_refused(saved, values):
    change(saved / "target.json", **values)
    with pytest.raises(InputError, match=r"target\.json: not a target file") as refused:
        load_target(saved, KEY, 9)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("tokens", "log_phi", "words"),
    [
        ([[1, 2, 9], [3, 2, 1]], [-0.5, -0.25], "outside the vocabulary"),
        ([[1, 2, 3], [3, 2, 1]], [-0.5, torch.nan], "log_phi"),
        ([[1, 2, 3], [3, 2, 1]], [-0.5, 0.5], "log_phi"),
        ([[1, 2, 3]], [-0.5], "shapes"),
    ],
)
def test_impossible_samples_of_a_target_are_refused(saved, tokens, log_phi, words):
    """As somebody would make them who also writes the hash."""
    path = saved / "samples.safetensors"
    tensors = {"tokens": torch.tensor(tokens).int(), "log_phi": torch.tensor(log_phi)}
    write_tensors(path, tensors)
    change(saved / "target.json", sha256=digest_of(path))
    with pytest.raises(InputError, match=rf"samples\.safetensors: .*{words}"):
        load_target(saved, KEY, 9)


def test_a_flipped_bit_in_the_shipped_samples_is_noticed(tmp_path):
    shutil.copytree(POCKET / "target", tmp_path, dirs_exist_ok=True)
    key = TargetKey(**json.loads((tmp_path / "target.json").read_text())["key"])
    assert len(load_target(tmp_path, key, 4096).tokens) == 530
    path = tmp_path / "samples.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"samples\.safetensors: .*another sha256"):
        load_target(tmp_path, key, 4096)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with (
        pytest.raises(InputError, match=r"file: cannot be written .*free space"),
        replacing(tmp_path / "file"),
    ):
        raise OSError(28, "No space left on device")
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"kl": float("nan")})
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_progress_keeps_every_step_and_refuses_what_is_not_finite(capsys):
    progress = Progress("2/9  twist learning", {"phase": "twist learning"}, 3, True)
    for ess in (1.0, 2.0, 3.0):
        progress(loss=torch.tensor(0.5), ess=ess)
    with pytest.raises(InputError, match="step 4: loss is nan; lower the learning rate"):
        progress(loss=torch.tensor(torch.nan))
    progress.bar.close()
    assert [record["ess"] for record in progress.records] == [1.0, 2.0, 3.0]
    assert progress.records[2] == {"phase": "twist learning", "step": 3, "loss": 0.5, "ess": 3.0}
    assert "2/9  twist learning: 100%" in capsys.readouterr().err


def test_new_directories_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pocket", "pocket-2", "pocket-3"):
        assert new_directory(RunConfig()) == Path("runs") / name
    with pytest.raises(InputError, match="--out runs/pocket: exists already"):
        new_directory(RunConfig(out="runs/pocket"))


def fake_run(path, seed: int, kl: float, **options):
    """A run's config.json and results.json."""
    row = {"toxicity": 0.5, "similarity": 0.4, "kl_target_proposal": kl, "ess": 5.0}
    target = {"toxicity": 0.9, "similarity": 0.3, "log_z": -7.5, "num_samples": 500}
    generations = [row, row | {"kl_target_proposal": kl - 2}]
    base = {"toxicity": 0.01, "similarity": 0.5}
    config = {"seed": seed, "out": str(path), "beta": 10.0} | options
    write_json(path / "config.json", config)
    results = {"base": base, "target": target, "generations": generations}
    write_json(path / "results.json", results)
    return path


def test_the_summary_averages_runs_and_pairs_the_change(tmp_path):
    paths = [fake_run(tmp_path / str(seed), seed, kl) for seed, kl in enumerate((8.0, 9.0, 10.0))]
    lines = summary.summarise(summary.read_runs(paths)).splitlines()
    assert lines[1].split() == ["Base", "0.010", "0.500"]
    assert "9.00 +- 2.48" in lines[3], "Student's t, two degrees of freedom: 4.303 / sqrt(3)"
    assert "-2.00" in lines[5] and "-2.00 +-" not in lines[5]
    assert summary.interval([1.0, 1.0], ".1f") == "1.0"


def test_two_sets_of_runs_are_compared_and_their_options_named(tmp_path, capsys):
    paths = {f"{name}{i}": 2.0 + (name == "b") + 0.1 * i for name in "ab" for i in range(3)}
    for path, kl in paths.items():
        fake_run(tmp_path / path, int(path[1]), kl, generations=4 if path[0] == "b" else 2)
    ours, theirs = ([str(tmp_path / f"{name}{i}") for i in range(3)] for name in "ab")
    summary.main([*ours, "--against", *theirs])
    out = capsys.readouterr().out
    assert "Against these runs, generations 4:" in out
    last = out.splitlines()[-1]  # Welch: t_4(0.975) * 0.0816
    assert last.startswith("Generation 1") and re.search(r"-1\.00 \+- 0\.23 ", last)
    with pytest.raises(SystemExit):
        summary.main([*ours, *theirs[:1]])


def test_the_summary_refuses_runs_of_different_options(tmp_path):
    paths = [fake_run(tmp_path / "a", 0, 8.0), fake_run(tmp_path / "b", 1, 8.0, beta=1.0)]
    with pytest.raises(InputError, match=r"differs from .* in beta"):
        summary.read_runs(paths)


@pytest.mark.parametrize("results", [{}, {"base": {}, "generations": [{"toxicity": "x"}]}])
def test_what_holds_no_results_is_refused_by_name(tmp_path, capsys, results):
    path = fake_run(tmp_path / "run", 0, 8.0)
    write_json(path / "results.json", results)
    write_json(path / "config.json", dataclasses.asdict(RunConfig()))
    for command, arguments in ((summary.main, [str(path)]), (main.main, ["--resume", str(path)])):
        with pytest.raises(SystemExit) as ended:
            command(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and "results.json: holds no results of a run" in line
