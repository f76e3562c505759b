"""The benchmark: every way of drawing runs, and the limit counts what PyTorch counts."""

import re
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from worlds import tiny_gpt_neo

from eval import bench
from tinystories import Conditional, InputError
from tsmc import tsmc
from twist.mlp import make_twist


@pytest.mark.parametrize(("size", "dtype"), [("pocket", torch.float32), ("paper", torch.bfloat16)])
def test_every_way_of_drawing_runs(monkeypatch, capsys, size, dtype):
    small = tiny_gpt_neo(4096, hidden_size=16).config
    for name, value in {"PARTICLES": (1, 3), "REPEATS": 1, "SIDE": 64, "PAPER": small}.items():
        monkeypatch.setattr(bench, name, value)
    bench.bench(size, dtype, torch.device("cpu"))
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(size)
    assert [re.match(r"\w+, K = \d", line)[0] for line in lines] == [
        f"{name}, K = {rows}" for rows in (1, 3) for name in ("sampling", "TSMC")
    ]
    for line in lines:
        ours, theirs, faster, limit, over = map(float, line.split()[4:])
        assert faster == pytest.approx(theirs / ours, rel=0.1) and limit >= 0 < over


def test_the_counterpart_in_transformers_has_the_same_weights():
    model = tiny_gpt_neo(11)
    ids = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(bench.counterpart(model)(ids).logits, model(ids))


@pytest.mark.parametrize("with_twist", [False, True])
def test_the_operations_are_those_that_pytorch_counts(with_twist):
    shape = {"hidden_size": 32, "intermediate_size": 128, "window_size": 32}
    model, source = tiny_gpt_neo(50, **shape), torch.Generator().manual_seed(0)
    base = Conditional(model, torch.arange(6), bench.LENGTH)
    twist = make_twist("mlp", base, source) if with_twist else None
    with FlopCounterMode(display=False) as counter:  # of one row, so that nothing is shared
        tsmc(base, twist, lambda tokens, log_p: 0 * log_p, 1, source)
    # Attention of a single query is a sum of products, which PyTorch does not count.
    claimed = bench.operations(model, twist, 1, 6)
    assert 0.9 * claimed < counter.get_total_flops() <= claimed


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install"):
        bench.counterpart(tiny_gpt_neo(11))
