"""What a run writes and reads: exact samples, whole files, steps; the statistics of its rows."""

import json
import math

import pytest
import torch

from eval.config import build
from eval.evaluate import population_row
from eval.metrics import energy_distance, energy_floor
from eval.run import Run, read_lines
from eval.world import load_target, save_target
from tinystories.checkpoint import read_json, replacing, write_json, write_tensors, write_text
from tinystories.errors import InputError
from tsmc import ExactSamples, Population

KEY = {"lm": "a" * 64, "toxicity_model": "b" * 64, "prompt": "Once", "length": 3, "beta": 10.0}
KEY |= {"end": "", "potential": ["toxicity"]}
TOKENS = torch.tensor([[1, 2, 3], [3, 2, 1]])
TARGET = ExactSamples(TOKENS, torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04)


def test_a_target_survives_its_file_and_serves_its_own_sigma(tmp_path):
    save_target(tmp_path, TARGET, KEY)
    again = load_target(tmp_path, KEY)
    assert torch.equal(again.tokens, TARGET.tokens) and torch.equal(again.log_phi, TARGET.log_phi)
    assert (again.num_proposals, again.log_z, again.log_z_std_error) == (900, -7.5, 0.04)
    for name in KEY:
        assert load_target(tmp_path, KEY | {name: "another"}) is None
    assert load_target(tmp_path, KEY | {"own.py": "c" * 64}) is None


def test_a_damaged_target_is_named(tmp_path):
    path = tmp_path / "samples.safetensors"
    save_target(tmp_path, TARGET, KEY)
    content = path.read_bytes()
    numbers = {"num_proposals": 900, "log_z": -7.5, "log_z_std_error": 0.04}
    tensors = {"tokens": TOKENS, "log_phi": TARGET.log_phi}
    for damage in (
        path.unlink,
        lambda: path.write_bytes(content[:-1]),
        lambda: path.write_bytes(content[:30] + b"?" + content[31:]),
        lambda: write_tensors(path, tensors),
        lambda: write_tensors(path, tensors, target=json.dumps(numbers)),
        lambda: write_tensors(path, tensors, target=json.dumps({"key": KEY})),
        lambda: write_tensors(path, {}, target=json.dumps(numbers | {"key": KEY})),
    ):
        damage()
        with pytest.raises(InputError, match=r"samples\.safetensors: .*; "):
            load_target(tmp_path, KEY)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with pytest.raises(InputError, match="cannot be written"), replacing(tmp_path / "file"):
        raise OSError(28, "No space left on device")
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"kl": float("nan")})
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_run_keeps_every_step(tmp_path, capsys, monkeypatch):
    """A new run has a directory of its own; JSON has null for NaN and infinity."""
    monkeypatch.chdir(tmp_path)
    config = build({"generations": 3})
    with Run(config, None, {}) as run, Run(config, None, {}) as second:
        assert [str(one.path) for one in (run, second)] == ["runs/pocket", "runs/pocket-2"]
        for ess in (1.0, 2.0):
            run("sampling", 1, 3)  # without figures
            run("twist learning", 1, 3, loss=torch.tensor(0.5), ess=ess)
        run.start -= 600.0  # the generation takes ten minutes, as each of the two others will
        run.say_time(1, {"toxicity": 0.25, "log_phi": None})
        *_, line = capsys.readouterr().err.splitlines()
        assert line == "generation 1: 600 s, toxicity 0.25, about 1200 s left"
        run.keep(None, {"base": {"kl": math.nan}}, [{"text": "a", "log_phi": -math.inf}])
        assert read_json(run.folder(None) / "row.json") == {"base": {"kl": None}}
        assert run.last() is None
        assert read_lines(run.folder(None) / "samples.jsonl") == [{"text": "a", "log_phi": None}]
        place = {"phase": "twist learning", "generation": 1}
        steps = [place | {"step": step, "loss": 0.5, "ess": float(step)} for step in (1, 2)]
        assert read_lines(run.folder(None) / "metrics.jsonl") == steps


def test_dead_runs_take_no_share_but_their_texts_count_as_scored():
    """Three runs of two particles, the last one dead."""
    tokens = torch.arange(6).view(3, 2, 1)
    log_weights = torch.tensor([[0.25, 0.75], [0.0, 2.0], [0.0, 0.0]]).log()
    log_z = torch.tensor([3.0, 1.0, 0.0]).log()
    ess = torch.tensor([1.6, 1.0, 0.0])
    population = Population(tokens, log_weights, log_weights, tokens, tokens, log_z, ess)
    shares = torch.tensor([[0.1875, 0.5625], [0.0, 0.25], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(population.shares(), shares)
    row = population_row(population)
    assert row["log_z"] == population.log_mean_z() == pytest.approx(math.log(4 / 3))
    assert row["dead_runs"] == 1 and row["largest_share"] == pytest.approx((0.75 + 1) / 2)
    assert row["worth"] == pytest.approx(1 / shares.square().sum().item() / 6)
    assert row["log_z_hat_mean"] == pytest.approx(math.log(3) / 2)


def test_the_energy_distance_tells_distributions_apart():
    source = torch.Generator().manual_seed(0)
    y, same, other = (torch.randn(400, 3, generator=source) for _ in range(3))
    distance = energy_distance(other + 1, y, torch.arange(400))
    assert abs(energy_distance(same, y, torch.arange(400))) < 2 * energy_floor(y, 400)
    between = torch.cdist(other + 1, y).mean()
    within = sum(torch.cdist(z, z).sum() / (400 * 399) for z in (other, y))
    assert distance == pytest.approx((2 * between - within).item(), abs=1e-4)
    copies, runs = (values[:100].repeat_interleave(4, 0) for values in (same, torch.arange(100)))
    assert abs(energy_distance(copies, y, runs)) < 0.1 * distance, "copies in a run do not count"
