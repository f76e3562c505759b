"""Run directories, targets on disk, writing whole or not at all, and the summary over runs."""

import dataclasses
import json

import pytest
import torch

from eval.run.directory import RunDirectory, free_name
from eval.run.options import RunConfig
from eval.run.target import Target, TargetKey, draw_target, load_target, save_target
from eval.summary import interval, read_runs, summarise
from tinystories.checkpoint import fingerprint, replacing, write_json, write_text
from tinystories.errors import InputError
from tsmc import rejection_sample
from tsmc.rejection import log_mean_with_error
from tsmc.steps import Phase
from tsmc.table import TableModel

KEY = TargetKey("a" * 64, "b" * 64, "Once", 3, 10.0)
TARGET = Target(torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04)


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

    drawn = rejection_sample(model, potential, 20_000, torch.Generator().manual_seed(2), chunk=3000)
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
        (0.5, r"log phi is 0\.5 .*subtract an upper bound.*--eval-target-proposals 0"),
        (torch.nan, "is NaN"),
    ):
        with pytest.raises(InputError, match=message):
            rejection_sample(
                model, lambda s, value=value: torch.full((len(s),), value), 10, torch.Generator().manual_seed(0)
            )


def test_a_target_that_nothing_reaches_says_what_to_change():
    model = TableModel.random(3, 2, torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"0 of 50 base samples.*--eval-target-proposals"):
        draw_target(model, lambda tokens: torch.full((len(tokens),), -99.0), 50, torch.Generator().manual_seed, Phase())


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
        phase = run.phase("twist learning", 1)
        for step in phase.steps(3):
            phase.report(loss=0.5, ess=step + 1.0)
    assert [record["ess"] for record in run.read_metrics()] == [1.0, 2.0, 3.0]
    line = capsys.readouterr().err.strip()
    assert line.startswith("generation 1  twist learning  3/3  loss 0.5") and "\r" not in line and "\x1b" not in line


def test_numbered_directories_never_collide(tmp_path):
    for name in ("pocket", "pocket-2", "pocket-3"):
        assert free_name(tmp_path, "pocket").name == name
        (tmp_path / name).mkdir()


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


def test_the_summary_refuses_runs_of_different_options(tmp_path):
    paths = [fake_run(tmp_path / "a", 0, 8.0), fake_run(tmp_path / "b", 1, 8.0, beta=1.0)]
    with pytest.raises(InputError, match=r"differs from .* in beta"):
        read_runs(paths)
