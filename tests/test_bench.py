"""The benchmark at a tiny scale: every race runs, and the limits are counted by hand."""

import json

import pytest
import torch

from eval.bench import __main__ as bench
from eval.bench import contestants, limit
from eval.run.options import DistillConfig
from tinystories import GPTNeo, GPTNeoConfig
from tinystories.fast import pack
from tinystories.gpt_neo import Linear
from twist.mlp import TwistMLP


def test_every_race_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "QUICK_PARTICLES", (3,))
    monkeypatch.setattr(contestants, "TEXTS", 5)
    monkeypatch.setattr(limit, "SIDE", 64)
    monkeypatch.setattr(bench, "DistillConfig", lambda: DistillConfig(batch_size=2))
    path = tmp_path / "bench.json"
    options = ["--quick", "--size", "pocket", "--threads", "1", "--dtype", "bfloat16"]
    bench.main([*options, "--json", str(path)])
    records = json.loads(path.read_text())["sizes"][0]["records"]
    assert len(records) == 7
    printed = capsys.readouterr().out
    for record in records:
        assert set(record["transformers"]) == {"float32", "bfloat16"} and record["name"] in printed
        assert min(record["seconds"], record["limit"], *record["transformers"].values()) > 0


def test_both_sides_have_the_same_weights(pocket_lm, pocket_toxicity, pocket_similarity):
    ids = torch.randint(5, 400, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        for network, _ in (pocket_lm, pocket_toxicity, pocket_similarity):
            theirs = contestants.counterpart(network, torch.float32)(ids, attention_mask=mask)
            if isinstance(network, GPTNeo):
                ours, theirs = network(ids), theirs.logits
            elif network is pocket_toxicity[0]:
                ours, theirs = network(ids, mask), theirs.logits[:, 0]
            else:
                mean = theirs.last_hidden_state.mean(1)
                ours, theirs = network(ids, mask), torch.nn.functional.normalize(mean, dim=-1)
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_operations_counted_by_hand():
    """One layer of width 2, inner width 3, vocabulary 5; 7 rows of 3 tokens after 4 of a prompt."""
    model = GPTNeo(GPTNeoConfig(5, 2, 1, 1, 16, ("global",), intermediate_size=3))
    matrices, head = 4 * 2 * 2 + 2 * 2 * 3, 2 * 5
    prompt = 4 * (matrices + 2 * 2 * 4 / 2)
    rows = 7 * 2 * (matrices + 2 * 2 * (4 + 3 / 2))
    flops = 2 * (prompt + rows + (7 * 2 + 1) * head)
    assert limit.sampling_flops(model, None, 7, 4, 3) == flops
    twisted = limit.sampling_flops(model, TwistMLP(2, 6, 5, torch.Generator()), 7, 4, 3)
    assert twisted == flops + 2 * (7 * 2 + 1) * (2 * 6 + 6 * 6 + 6 * 5)
    config = contestants.PAPER["similarity"]
    one, two, both = (limit.encoder_flops(config, lengths) for lengths in ([10], [20], [10, 20]))
    assert one + two == both and two > 2 * one


@pytest.mark.parametrize("rows", [64, 2000])
def test_products_are_counted_whoever_computes_them(rows):
    """Small and large products, a packed weight, and both passes of training: 2 N I O each."""
    one, x = 2 * rows * 192 * 512, torch.randn(rows, 192)
    layer, counts = Linear(192, 512), []
    for network in (layer, pack(layer)):
        with torch.no_grad(), limit.counter() as operations:
            network(x)
        counts.append(operations.get_total_flops())
    with limit.counter() as operations:
        layer(x).square().sum().backward()
    assert [*counts, operations.get_total_flops()] == [one, one, 2 * one]  # x needs no gradient
