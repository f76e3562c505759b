"""What a run writes and reads, whole files; the statistics of its rows."""

import math

import pytest
import torch
import torch.nn.functional as F

from eval.evaluate import population_row
from eval.metrics import energy_distance, energy_floor, mean_pairwise_cosine
from eval.options import build
from eval.run import Run, read_lines
from tinystories.files import read_json
from tsmc import Population


def test_a_new_run_has_a_directory_of_its_own_and_json_has_null(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = build({"generations": 3})
    with Run(config, None) as run, Run(config, None) as second:
        assert [str(one.path) for one in (run, second)] == ["runs/pocket", "runs/pocket-2"]
        row = {"base": {"kl": math.nan, "examples": []}}
        run.keep(None, row, [{"text": "a", "log_phi": -math.inf}], None)
        assert run.row(None) == read_json(run.folder(None) / "row.json")
        assert run.row(None)["base"]["kl"] is None and run.generations() == 0
        assert read_lines(run.folder(None) / "samples.jsonl") == [{"text": "a", "log_phi": None}]


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


def test_mean_pairwise_cosine_is_the_double_loop():
    vectors = 3 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    unit = F.normalize(vectors.double(), dim=-1)
    cosines = [unit[i] @ unit[j] for i in range(6) for j in range(6) if i != j]
    mean = sum(cosines).item() / 30
    assert mean_pairwise_cosine(vectors) == pytest.approx(mean, abs=1e-12)
