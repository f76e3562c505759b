"""The benchmark at a tiny scale: every race runs, and the limits are counted by hand."""

import json
import sys
import time

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
    names, scorers = [record["name"] for record in records], ("classifier", "sentence encoder")
    assert names[:3] == ["sampling, K = 3", "TSMC, K = 3", "distillation step, 2 samples"]
    texts = ("5 texts of 30 tokens", "5 texts of 11 to 122 tokens")
    assert names[3:] == [f"{label}, {span}" for label in scorers for span in texts]
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


@pytest.mark.parametrize("options", [["--threads", "0"], ["--device", "nowhere"], ["--quick"]])
def test_bad_options_and_missing_transformers_end_in_one_line(monkeypatch, capsys, options):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as caught:
        bench.main([*options, "--size", "pocket"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    assert ("requirements-dev.txt" if options == ["--quick"] else options[0]) in error


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


def test_times_are_medians_in_turns_without_the_first_and_the_faster_product_is_the_rate(
    monkeypatch,
):
    monkeypatch.setattr(limit, "SIDE", 64)
    monkeypatch.setattr(limit, "suits_onednn", lambda a, b: True)
    monkeypatch.setattr(limit, "onednn", lambda a, b: time.sleep(0.05))
    order, waits = [], iter([0.2, 0.0, 0.05, 0.0])
    ways = {"a": lambda: order.append("a"), "b": lambda: time.sleep(next(waits))}
    ways["c"] = lambda: order.append("c")
    seconds, rate = limit.measure(ways, 3, torch.empty(0))
    assert order == ["a", "c"] * 4 and seconds["b"] < 0.04 < seconds["oneDNN product"]
    assert rate == 2 * limit.SIDE**3 / seconds["product"] and seconds["product"] < 0.04


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


def test_the_main_job_is_timed_by_itself_and_counted_in_a_run_of_its_own(monkeypatch):
    """Counting delays every operation: the seconds of the second run, here slow, must not count."""
    runs = []

    def job(arguments: list[str]) -> None:
        runs.append(arguments)
        torch.randn(512, 1024) @ torch.randn(1024, 1024)
        time.sleep(0.0 if len(runs) == 1 else 1.0)

    monkeypatch.setattr(bench.runpy, "run_module", lambda name: {"main": job})
    monkeypatch.setattr(limit, "SIDE", 64)
    made = bench.bench_main(quick=True)
    assert [arguments[:2] for arguments in runs] == 2 * [["--generations", "0"]]
    assert made["seconds"] < 0.9 and made["flops"] == 2 * 512 * 1024 * 1024
