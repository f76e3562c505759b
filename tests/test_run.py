"""Run directories, targets on disk, writing whole or not at all, and the summary over runs."""

import dataclasses
import json
import math
import re
import shutil
import sys

import pytest
import torch

from eval import summary
from eval.run.directory import RunDirectory, free_name, remove_left_overs
from eval.run.options import POCKET, RunConfig, saved_config
from eval.run.state import digest_of
from eval.run.steps import Progress, RunSteps
from eval.run.target import TargetKey, load_target, save_target
from eval.summary import interval, read_runs, summarise
from main import main
from tinystories.checkpoint import fingerprint, replacing, write_json, write_tensors, write_text
from tinystories.errors import InputError
from tsmc import Chunks, ExactSamples, rejection_sample
from tsmc.rejection import log_mean_with_error
from tsmc.table import TableModel

KEY = TargetKey("a" * 64, "b" * 64, "Once", 3, 10.0)
TARGET = ExactSamples(torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04)


def test_a_target_survives_its_files(tmp_path):
    save_target(tmp_path, TARGET, KEY, seed=0)
    again = load_target(tmp_path, KEY)
    assert torch.equal(again.tokens, TARGET.tokens) and torch.equal(again.log_phi, TARGET.log_phi)
    assert (again.num_proposals, again.log_z, again.log_z_std_error) == (900, -7.5, 0.04)


@pytest.mark.parametrize("role", ["lm", "toxicity"])
def test_a_target_of_other_checkpoints_is_refused(tmp_path, role):
    save_target(tmp_path, TARGET, KEY)
    with pytest.raises(InputError, match=rf"stale, it was made for another {role} checkpoint"):
        load_target(tmp_path, dataclasses.replace(KEY, **{role: "c" * 64}))


@pytest.mark.parametrize("change", [{"beta": 1.0}, {"length": 4}, {"prompt": "Two"}])
def test_a_target_of_other_options_is_passed_over(tmp_path, change):
    save_target(tmp_path, TARGET, KEY)
    assert load_target(tmp_path, dataclasses.replace(KEY, **change)) is None


def test_target_files_that_do_not_fit_each_other_are_refused(tmp_path):
    save_target(tmp_path, TARGET, KEY)
    raw = json.loads((tmp_path / "target.json").read_text())
    write_json(tmp_path / "target.json", raw | {"num_samples": 3})
    with pytest.raises(InputError, match=r"samples\.safetensors: does not fit"):
        load_target(tmp_path, KEY)
    write_json(tmp_path / "target.json", {"key": {}})
    with pytest.raises(InputError, match=r"target\.json: not a target file"):
        load_target(tmp_path, KEY)


@pytest.mark.parametrize("name", ["num_samples", "num_proposals", "log_z", "log_z_std_error"])
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", '"8"', "null", "true", "[1]", "1" + 400 * "0", "-1e300"]
)
def test_impossible_numbers_in_a_target_are_refused(tmp_path, name, value):
    save_target(tmp_path, TARGET, KEY)
    path = tmp_path / "target.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {name: "HERE"}).replace('"HERE"', value))
    with pytest.raises(InputError, match=rf"target\.json: {name} is") as refused:
        load_target(tmp_path, KEY)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "change", [{"num_proposals": 1}, {"num_samples": 1}, {"num_samples": -2}, {"log_z_std_error": -0.1}]
)
def test_numbers_of_a_target_that_contradict_each_other_are_refused(tmp_path, change):
    save_target(tmp_path, TARGET, KEY)
    write_json(tmp_path / "target.json", json.loads((tmp_path / "target.json").read_text()) | change)
    with pytest.raises(InputError, match=r"target\.json: its numbers contradict each other"):
        load_target(tmp_path, KEY)


@pytest.mark.parametrize(
    "change", [{"lm": None}, {"length": "3"}, {"length": True}, {"beta": [1]}, {"potential": "toxicity"}, {"more": 1}]
)
def test_a_key_of_a_target_has_the_right_types(tmp_path, change):
    save_target(tmp_path, TARGET, KEY)
    raw = json.loads((tmp_path / "target.json").read_text())
    write_json(tmp_path / "target.json", raw | {"key": raw["key"] | change})
    (name,) = change
    with pytest.raises(InputError, match=rf"target\.json: ({name} is|not a target file .*{name})"):
        load_target(tmp_path, KEY)


@pytest.mark.parametrize(
    ("tokens", "log_phi", "words"),
    [
        ([[1, 2, 9], [3, 2, 1]], [-0.5, -0.25], "not of the vocabulary"),
        ([[1, 2, -1], [3, 2, 1]], [-0.5, -0.25], "not of the vocabulary"),
        ([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], [-0.5, -0.25], "not of the vocabulary"),
        ([[1, 2, 3], [3, 2, 1]], [-0.5, math.nan], "log_phi"),
        ([[1, 2, 3], [3, 2, 1]], [-0.5, -math.inf], "log_phi"),
        ([[1, 2, 3], [3, 2, 1]], [-0.5, 0.5], "log_phi"),
        ([[1, 2, 3], [3, 2, 1]], [-1, 0], "log_phi"),
        ([[1, 2, 3]], [-0.5], "does not fit"),
    ],
)
def test_impossible_samples_of_a_target_are_refused(tmp_path, tokens, log_phi, words):
    """As somebody would make them who also writes the hash."""
    save_target(tmp_path, TARGET, KEY)
    path = tmp_path / "samples.safetensors"
    tokens = torch.tensor(tokens)
    write_tensors(
        path, {"tokens": tokens if tokens.is_floating_point() else tokens.int(), "log_phi": torch.tensor(log_phi)}
    )
    raw = json.loads((tmp_path / "target.json").read_text())
    write_json(tmp_path / "target.json", raw | {"sha256": digest_of(path)})
    with pytest.raises(InputError, match=rf"samples\.safetensors: .*{words}"):
        load_target(tmp_path, KEY, vocab_size=9)


@pytest.mark.parametrize("directory", [None, POCKET / "target"])
def test_a_flipped_bit_in_the_samples_of_a_target_is_noticed(tmp_path, directory):
    save_target(tmp_path, TARGET, KEY)
    if directory is not None:
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    key = TargetKey(**json.loads((tmp_path / "target.json").read_text())["key"])
    assert load_target(tmp_path, key) is not None
    path = tmp_path / "samples.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"samples\.safetensors: is not as it was written"):
        load_target(tmp_path, key)


def test_a_fingerprint_follows_every_file(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name + "!")
        assert fingerprint(tmp_path) != first
        (tmp_path / name).write_text(name)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        fingerprint(tmp_path)


def test_rejection_estimates_the_evidence_and_samples_sigma():
    model = TableModel.random(3, 2, torch.Generator().manual_seed(0))
    log_phi = -torch.rand(9, generator=torch.Generator().manual_seed(1)) * 3

    def potential(tokens):
        return log_phi[tokens[:, 0] * 3 + tokens[:, 1]]

    stream = torch.Generator().manual_seed(2)
    drawn = rejection_sample(model, potential, Chunks(20_000, 3000, lambda chunk: stream))
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    sigma = (model.log_probs(every)[0].sum(-1) + potential(every)).detach()
    assert abs(drawn.log_z - sigma.logsumexp(0)) < 4 * drawn.log_z_std_error
    assert torch.equal(drawn.log_phi, potential(drawn.tokens))
    observed = torch.bincount(drawn.tokens[:, 0] * 3 + drawn.tokens[:, 1], minlength=9).double()
    expected = sigma.softmax(0) * len(drawn.tokens)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 26.1, "the 0.1 % point of chi-square with 8 degrees of freedom"


def test_a_potential_above_one_is_no_ground_for_rejection():
    model = TableModel.random(3, 2, torch.Generator().manual_seed(0))
    for value, message in (
        (0.5, r"log phi is 0\.5 .*subtract an upper bound.*or do without exact samples"),
        (torch.nan, "is NaN"),
    ):
        with pytest.raises(InputError, match=message):
            chunks = Chunks(10, 10, torch.Generator().manual_seed)
            rejection_sample(model, lambda s, value=value: torch.full((len(s),), value), chunks)


def test_a_target_that_nothing_reaches_says_what_to_change(tmp_path, capsys):
    options = ["--potential", "keyword:zyzzyva", "--length", "2", "--eval-target-proposals", "50"]
    options += ["--eval-base-samples", "30"]
    with pytest.raises(SystemExit) as ended:
        main([*options, "--out", str(tmp_path / "run"), "--pool-base-draws", "60"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.search(r"0 of 50 base samples.*no row Target.*--eval-target-proposals", said)
    assert "0 of 30 base samples have phi > 0: about 0.0 of the 60 that the twist first learns from" in said
    assert "none of the 60 sequences drawn has phi > 0; draw more, or soften" in said.splitlines()[-1]
    with pytest.raises(SystemExit) as ended:
        main([*options, "--out", str(tmp_path / "other"), "--method", "distilled"])
    assert ended.value.code == 2
    assert "too few for --method distilled; use --method pooled" in capsys.readouterr().err.splitlines()[-1]


def test_the_error_of_a_log_mean():
    values = torch.tensor([0.1, 0.3, 0.2, 0.4])
    log_mean, error = log_mean_with_error(values.log())
    assert log_mean == pytest.approx(torch.tensor(0.25).log().item())
    assert error == pytest.approx(values.std().item() / 2 / 0.25)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    with (
        pytest.raises(InputError, match=r"out\.json: cannot be written .*free space"),
        replacing(tmp_path / "out.json"),
    ):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_nan_is_never_written_as_json(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"kl": float("nan")})
    assert not list(tmp_path.iterdir())


def test_progress_logs_every_step_and_prints_plain_lines(tmp_path, capsys):
    with RunDirectory.create(RunConfig(out=str(tmp_path / "run")), {}) as run:
        steps = RunSteps(Progress(run, "twist learning", 1, 3), {})
        for step in steps:
            steps.report(loss=0.5, ess=step + 1.0)
    assert [record["ess"] for record in run.read_metrics()] == [1.0, 2.0, 3.0]
    line = capsys.readouterr().err.strip()
    assert line.startswith("generation 1  twist learning  3/3  loss 0.5") and "\r" not in line and "\x1b" not in line


def test_numbered_directories_never_collide(tmp_path):
    for name in ("pocket", "pocket-2", "pocket-3"):
        assert free_name(tmp_path, "pocket").name == name
        (tmp_path / name).mkdir()


def test_only_temporary_files_of_this_program_are_left_overs(tmp_path):
    own = [".config.json.a1b2c3d4", "generation-0/.model.safetensors.zzzzzzz_", "generation-0/.tmpXa3Bc9"]
    own += ["resume/.0-twist-learning.00000000", "resume/.1-sampling-prompt-2.abcdefgh", "resume/.start.abcdefgh"]
    own += ["figures/prompt-2/.toxicity-histogram.png.abcdefgh", "figures/.twist-learning.png.12345678"]
    others = [
        ".env.local",
        ".env.database",
        ".lock",
        ".gitignore",
        ".tmp",
        ".hidden.d/file",
        ".a.json.abcdefgh/notes.txt",
    ]
    others += [".editorconfig", "resume/0-twist-learning", "generation-0/model.safetensors", "generation-0/.tmp.model"]
    for name in (*own, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    remove_left_overs(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(others)


@pytest.mark.parametrize("change", [{"length": 20.5}, {"length": True}, {"lm": 7}, {"prompt": []}, {"beta": 10**400}])
def test_options_of_a_run_have_the_right_types(tmp_path, change):
    write_json(tmp_path / "config.json", dataclasses.asdict(RunConfig()) | {"ctl": {}, "eval": {"runs": 7}} | change)
    (name,) = change
    with pytest.raises(InputError, match=rf"config\.json: holds no options of a run \((.*{name}|int too large)"):
        saved_config(tmp_path)


def fake_run(path, seed: int, kl: float, **config):
    """A run's config.json and results.json."""
    row = {"toxicity": 0.5, "similarity": 0.4, "kl_target_proposal": kl, "log_z_hat_mean": -9.0, "log_z_hat_std": 1.0}
    row |= {"ess": 5.0, "distinct": 0.2}
    last = row | {"kl_target_proposal": kl - 2}
    target = {"toxicity": 0.9, "similarity": 0.3, "log_z": -7.5, "num_samples": 500}
    results = {"base": {"toxicity": 0.01, "similarity": 0.5}, "target": target, "generations": [row, last]}
    write_json(path / "config.json", {"seed": seed, "out": str(path), "beta": 10.0} | config)
    write_json(path / "results.json", results)
    return path


def test_the_summary_averages_runs_and_pairs_the_change(tmp_path):
    paths = [fake_run(tmp_path / str(seed), seed, kl) for seed, kl in enumerate((8.0, 9.0, 10.0))]
    lines = summarise(read_runs(paths)).splitlines()
    assert lines[1].split() == ["Base", "0.010", "0.500"]
    assert "9.00 +- 2.48" in lines[3], "Student's t with two degrees of freedom: 4.303 / sqrt(3)"
    assert "-2.00" in lines[5] and "-2.00 +-" not in lines[5]
    assert interval([1.0, 1.0], ".1f") == "1.0"


@pytest.mark.parametrize(
    "results", [{}, {"base": 3, "generations": []}, {"base": {}, "generations": [{"toxicity": "x"}]}]
)
def test_what_holds_no_results_is_refused_by_name(tmp_path, capsys, monkeypatch, results):
    path = fake_run(tmp_path / "run", 0, 8.0)
    write_json(path / "results.json", results)
    write_json(path / "config.json", dataclasses.asdict(RunConfig()))
    monkeypatch.setattr(sys, "argv", ["summary", str(path)])
    for command in (summary.main, lambda: main(["--resume", str(path)])):
        with pytest.raises(SystemExit) as ended:
            command()
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and "results.json: holds no results of a run" in line


def test_the_summary_refuses_runs_of_several_prompts(tmp_path, capsys, monkeypatch):
    path = fake_run(tmp_path / "run", 0, 8.0)
    result = json.loads((path / "results.json").read_text())
    write_json(path / "results.json", {"prompts": [{"prompt": "One", **result}, {"prompt": "Two", **result}]})
    monkeypatch.setattr(sys, "argv", ["summary", str(path)])
    with pytest.raises(SystemExit) as ended:
        summary.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and str(path) in line and "several prompts" in line


def test_the_summary_refuses_runs_of_different_options(tmp_path):
    paths = [fake_run(tmp_path / "a", 0, 8.0), fake_run(tmp_path / "b", 1, 8.0, beta=1.0)]
    with pytest.raises(InputError, match=r"differs from .* in beta"):
        read_runs(paths)
