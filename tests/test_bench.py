"""The benchmark at a tiny scale: every race runs, and the limits are counted by hand."""

import torch

from distill.published import PublishedOptions
from eval.bench import __main__ as bench
from eval.bench import contestants, limit
from tinystories import GPTNeo, GPTNeoConfig
from twist.mlp import TwistMLP


def test_every_race_runs(monkeypatch, capsys):
    monkeypatch.setattr(bench, "QUICK_PARTICLES", (3,))
    monkeypatch.setattr(contestants, "TEXTS", 5)
    monkeypatch.setattr(limit, "SIDE", 64)
    monkeypatch.setattr(bench, "PublishedOptions", lambda: PublishedOptions(distill_batch_size=2))
    size, records = bench.bench_size, []
    monkeypatch.setattr(bench, "bench_size", lambda *options: records.extend(size(*options)))
    bench.main(["--quick", "--size", "pocket", "--dtype", "bfloat16"])
    assert len(records) == 5
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
