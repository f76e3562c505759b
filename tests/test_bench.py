"""The benchmark at a tiny scale: every contest runs, the table and the file are whole; the limits are counted by hand."""

import json
import sys
import time

import pytest
import torch

from eval.bench import __main__ as bench
from eval.bench import contestants, growth, roofline, whole
from eval.bench.roofline import Work, encoder_work, gpt_neo_flops, sampling_work
from eval.bench.whole import Mark, budget, counter, marked
from eval.run.options import DistillConfig
from tinystories import GPTNeo, GPTNeoConfig, InputError
from tinystories.fast import accelerate
from twist import TwistMLP


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_contest_runs(tmp_path, monkeypatch, capsys, dtype):
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench, "QUICK_PARTICLES", (3,))
    monkeypatch.setattr(contestants, "TEXTS", 5)
    monkeypatch.setattr(roofline, "SIDE", 64)
    monkeypatch.setattr(roofline, "COPIED", 2**16)
    monkeypatch.setattr(bench, "DistillConfig", lambda: DistillConfig(batch_size=2))
    path = tmp_path / "bench.json"
    options = ["--quick", "--size", "pocket", "--threads", str(threads), "--dtype", dtype, "--json", str(path)]
    bench.main(options)
    result = json.loads(path.read_text())["sizes"][0]
    names = [record["name"] for record in result["records"]]
    assert [name.split(",")[0] for name in names] == [
        "sampling",
        "TSMC",
        "distillation step",
        *2 * ["classifier"],
        *2 * ["sentence encoder"],
    ]
    for record in result["records"]:
        assert set(record["transformers"]) == {"float32", dtype}
        assert min(record["seconds"], record["limit"], *record["transformers"].values()) > 0
    assert set(result["memory"]) == {"TSMC", "rejection", "scoring"}
    assert all(0 < memory["before"] <= memory["peak"] < 2**32 for memory in result["memory"].values())
    assert ("log_phi_change" in result) == (dtype == "bfloat16")
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_without_transformers_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as caught:
        bench.main(["--quick"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "requirements-dev.txt" in error


@pytest.mark.parametrize(
    "options", [["--threads", "0"], ["--device", "nowhere"], ["--growth", "g.png", "--quick"], ["--growth", "g"]]
)
def test_bad_options_are_refused_in_one_line(capsys, options):
    with pytest.raises(SystemExit) as caught:
        bench.main(options)
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_growth_says_where_memory_is_not_told(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "process_memory", lambda field: None)
    with pytest.raises(InputError, match="--growth needs the memory"):
        growth.bench_growth("pocket", tmp_path / "growth.png")


def test_growth_is_measured_along_every_axis(tmp_path, monkeypatch, capsys):
    Point = growth.Point
    axes = {
        "particles": [Point(2), Point(6)],
        "length": [Point(3, 4), Point(3, 8)],
        "runs": [Point(3), Point(3, runs=2)],
    }
    monkeypatch.setattr(growth, "AXES", {"pocket": axes})
    bench.main(["--growth", str(tmp_path / "growth.png")])
    printed = capsys.readouterr().out
    assert all(title in printed for title in growth.TITLES.values())
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_the_exponent_tells_squares_from_proportion():
    points = [growth.Point(10), growth.Point(20), growth.Point(40)]
    lines = growth.growth_table("particles", points, [(1.0, 2**20), (2.0, 2**21), (8.0, 2**22)]).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["1.00", "2.00"]


def test_work_counted_by_hand():
    """One layer of width 2, inner width 3, vocabulary 5: products of the prompt once, of T - 1 tokens for every row."""
    config = GPTNeoConfig(5, 2, 1, 1, 16, ("global",), intermediate_size=3)
    matrices, head = 4 * 2 * 2 + 2 * 2 * 3, 2 * 5
    prompt = 4 * (matrices + 2 * 2 * 4 / 2)
    rows = 7 * 2 * (matrices + 2 * 2 * (4 + 3 / 2))
    flops = 2 * (prompt + rows + (7 * 2 + 1) * head)
    assert gpt_neo_flops(config, 7, 4, 3) == flops
    model, twist = GPTNeo(config), TwistMLP(2, 6, 5, torch.Generator())
    plain, twisted = (sampling_work(model, psi, 7, 4, 3) for psi in (None, twist))
    assert plain.flops == flops
    assert twisted.flops == flops + 2 * (7 * 2 + 1) * (2 * 6 + 6 * 6 + 6 * 5)
    parameters = 4 * sum(p.numel() for p in twist.parameters())
    assert twisted.bytes - plain.bytes == 3 * (parameters + 2 * 4 * 7 * 5)


def test_limit_is_the_scarcer_of_products_and_traffic():
    rates = Work(flops=100.0, bytes=10.0)
    assert Work(200.0, 10.0).limit(rates) == 2.0 and Work(100.0, 30.0).limit(rates) == 3.0


def test_work_of_texts_grows_with_each_length():
    config = contestants.PAPER["similarity"]
    assert encoder_work(config, [5, 9]).flops == encoder_work(config, [5]).flops + encoder_work(config, [9]).flops
    assert encoder_work(config, [20]).flops > 2 * encoder_work(config, [10]).flops


@pytest.mark.parametrize("rows", [64, 2000])
def test_products_are_counted_whoever_computes_them(rows):
    """Plain and fast layers, a weight that is packed, and both passes of training: 2 N I O each."""
    one, x = 2 * rows * 192 * 512, torch.randn(rows, 192)
    plain = torch.nn.Linear(192, 512)
    fast = accelerate(torch.nn.Sequential(torch.nn.Linear(192, 512)))
    counts = []
    for layer in (plain, fast):
        for trained in (False, True):
            marks = []
            with counter() as operations, marked(marks, operations.get_total_flops), torch.set_grad_enabled(trained):
                y = layer(x)
                if trained:
                    y.sum().backward()
            counts.append(marks[-1].flops - marks[0].flops)
    assert counts == [one, 2 * one, one, 2 * one], "x needs no gradient: one product forward, one for the weight"


def test_the_main_job_is_timed_by_itself_and_counted_in_a_run_of_its_own(monkeypatch, capsys):
    """Counting delays every operation, so the slow second run stands for it: its seconds must not be told."""
    runs = []

    def job(*_, **__) -> None:
        runs.append(sys.argv)
        torch.randn(512, 1024) @ torch.randn(1024, 1024)
        time.sleep(0.0 if len(runs) == 1 else 1.0)

    monkeypatch.setattr(whole.runpy, "run_path", job)
    monkeypatch.setattr(whole, "product_rate", lambda: 1e12)
    whole.bench_main(quick=True)
    _, seconds, texts, operations, *_ = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("together")
    ).split()
    assert len(runs) == 2 and all(argv[:3] == ["main.py", "--generations", "0"] for argv in runs)
    assert float(seconds) < 0.9 and (texts, operations) == ("0", "1")


def test_the_budget_sums_generations_and_rounds():
    marks = [Mark("loading", 0.0, 0.0, 0), Mark("round 1", 1.0, 0.0, 0), Mark("round 2", 3.0, 4e9, 7)]
    marks += [Mark("evaluation", 6.0, 12e9, 9), Mark("", 7.0, 13e9, 10)]
    lines = {line[0]: line[1:] for line in budget(marks, 4e9)}
    assert lines["loading"] == ["1.0", "0", "0", "0.0", ""]
    assert lines["round"] == ["5.0", "9", "12", "3.0", "1.67"] and lines["together"] == [
        "7.0",
        "10",
        "13",
        "3.2",
        "2.15",
    ]
