"""The benchmark at a tiny scale: every race runs, and the limits are counted by hand."""

from distill.published import PublishedOptions
from eval.bench import __main__ as bench
from eval.bench import contestants, limit


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
