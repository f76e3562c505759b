"""The benchmark: every way of drawing runs, and the limit counts what PyTorch counts."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from worlds import tiny_gpt_neo

from eval import bench
from tinystories import Conditional
from tsmc import tsmc
from twist.mlp import make_twist


def test_every_way_of_drawing_runs(monkeypatch, capsys):
    for name, value in {"PARTICLES": (1, 3), "REPEATS": 1, "SIDE": 64}.items():
        monkeypatch.setattr(bench, name, value)
    bench.bench(torch.device("cpu"))
    _, *lines = capsys.readouterr().out.splitlines()
    assert [re.match(r"\w+, K = \d", line)[0] for line in lines] == [
        f"{name}, K = {rows}" for rows in (1, 3) for name in ("sampling", "TSMC")
    ]
    for line in lines:
        ours, theirs, faster, limit, over = map(float, line.split()[4:])
        assert faster == pytest.approx(theirs / ours, rel=0.1) and limit >= 0 < over


@pytest.mark.parametrize("with_twist", [False, True])
def test_the_operations_are_those_that_pytorch_counts(with_twist):
    shape = {"hidden_size": 32, "intermediate_size": 128, "window_size": 32}
    source = torch.Generator().manual_seed(0)
    model = Conditional(tiny_gpt_neo(50, **shape), torch.arange(6), bench.LENGTH)
    twist = make_twist("mlp", model, source) if with_twist else None
    with FlopCounterMode(display=False) as counter:  # of one row, so that nothing is shared
        tsmc(model, twist, lambda tokens, log_p: 0 * log_p, 1, source)
    # Attention of a single query is a sum of products, which PyTorch does not count.
    claimed = bench.operations(model, twist, 1)
    assert 0.9 * claimed < counter.get_total_flops() <= claimed
