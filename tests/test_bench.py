"""The benchmark: every way of drawing runs, and each K has its line."""

import re

import torch

from eval import bench


def test_every_way_of_drawing_runs(monkeypatch, capsys):
    monkeypatch.setattr(bench, "PARTICLES", (1, 3))
    monkeypatch.setattr(bench, "LEAST_SECONDS", 0.01)
    bench.bench(torch.device("cpu"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["K = 1", "K = 3"]
    for line in lines:
        ways = re.findall(r"(\w[\w ]+) (\d+\.\d{3})", line)
        names = ["sampling", "one pass", "generate", "TSMC", "one pass with psi"]
        assert [name for name, _ in ways] == names and all(float(value) > 0 for _, value in ways)
