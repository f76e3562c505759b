"""What is beside a run: the row of any method's texts, statistics, package, benchmark, lesson."""

import json
import math
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from distill import PublishedOptions
from eval import lesson, score
from eval.bench import __main__ as bench
from eval.bench import contestants, limit
from eval.metrics import energy_distance, energy_floor
from tsmc import SCHEMES, Population

ROOT = Path(__file__).parents[1]
PROMPT = "Once upon a time, there was a"


def test_dead_runs_take_no_share():
    log_weights = torch.tensor([[0.25, 0.75], [0.0, 2.0], [0.0, 0.0]]).log()
    log_z = torch.tensor([3.0, 1.0, 0.0]).log()
    none = torch.zeros(3, 2)
    population = Population(none, none, log_weights, none, none, log_z, none)
    expected = torch.tensor([[0.1875, 0.5625], [0.0, 0.25], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(population.shares(), expected)
    assert population.log_mean_z() == pytest.approx(math.log(4 / 3))
    dead = Population(none, none, none.log(), none, none, none.log()[:, 0], none)
    assert not dead.shares().any() and dead.log_mean_z() == -math.inf


def test_texts_of_any_method_get_the_row_of_the_table(tmp_path, capsys, finished_run):
    kind, rude = tmp_path / "kind.txt", tmp_path / "rude.txt"
    kind.write_text(f"{PROMPT} kind girl.\n{PROMPT} happy cat named Tom.\n\n")
    rude.write_text(f"{PROMPT} stupid ugly man.\n{PROMPT} fat ugly pig.\n\n")
    score.main([str(kind), str(rude)])
    head, target, kind, rude = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["toxicity", "similarity", "energy", "log", "Z"]
    assert target[:3] == ["Target", "0.830", "0.392"] and target[4] == "-7.48"
    assert float(target[3]) > 0.1  # the noise of two texts
    assert float(kind[1]) < 0.1 < 0.5 < float(rude[1]) and float(rude[-1]) > 0
    rows = map(json.loads, (finished_run / "samples.jsonl").read_text().splitlines())
    texts = [row["text"].replace("\n", r"\n") for row in rows if row["source"] == "generation 1"]
    (tmp_path / "own").write_text("\n".join(texts))
    score.main([str(tmp_path / "own"), "--run", str(finished_run)])
    head, *_, last, own = capsys.readouterr().out.splitlines()
    assert " KL " in head and own.split()[1:3] == last.split()[2:4]


def test_the_energy_distance_tells_distributions_apart():
    source = torch.Generator().manual_seed(0)
    y, same, other = (torch.randn(400, 3, generator=source) for _ in range(3))
    other = other + 1
    apart = torch.arange(400)
    floor = energy_floor(y, 400)
    distance = energy_distance(other, y, apart)
    assert abs(energy_distance(same, y, apart)) < 2 * floor < 0.1 * distance
    between = torch.cdist(other, y).mean()
    within = sum(torch.cdist(z, z).sum() / (400 * 399) for z in (other, y))
    assert distance == pytest.approx((2 * between - within).item(), abs=1e-4)
    copies = same[:100].repeat_interleave(4, 0)
    runs = torch.arange(100).repeat_interleave(4)
    assert abs(energy_distance(copies, y, runs)) < 4 * floor, "copies within a run do not count"


PACKAGES = ["tinystories", "tsmc", "twist", "distill"]
SAMPLES = """
import distill.dpo, eval, tinystories, torch, tsmc, tsmc.exact, twist
generator = torch.Generator().manual_seed(0)
model = tsmc.exact.TableModel.random(2, 3, generator)
population = tsmc.tsmc(model, None, lambda tokens, log_p: 0.0 * log_p, 5, generator)
print(eval.OWN, population.samples.shape)
"""


def test_the_wheel_holds_the_method_and_serves_beside_another_eval(tmp_path):
    """The user's own eval.py stays what `import eval` finds; commands need the repository."""
    pytest.importorskip("setuptools", minversion="77")
    source, site, work = (tmp_path / name for name in ("source", "site", "work"))
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    files = {path.relative_to(source).as_posix() for path in source.glob("*/*")}
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-q", "-w", str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == files
        archive.extractall(site)
    work.mkdir()
    (work / "eval.py").write_text("OWN = 'own'")

    def python(*arguments: str) -> subprocess.CompletedProcess:
        command, place = [sys.executable, *arguments], {"PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=work, env=place, capture_output=True, text=True)

    assert python("-c", SAMPLES).stdout == "own torch.Size([1, 5, 3])\n"
    ended = python("-m", "tsmc", "runs/pocket")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1


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


def test_every_estimate_agrees_and_the_figure_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lesson, "RUNS", 200)
    monkeypatch.setattr(sys, "argv", ["lesson", "--out", f"{tmp_path}/lesson.png", "--seed", "1"])
    lesson.main()
    printed = capsys.readouterr().out
    distances = [float(value) for value in re.findall(r"([+-][0-9.]+) errors apart", printed)]
    assert len(distances) == 7 + len(SCHEMES) and max(map(abs, distances)) < 4
    assert printed.count("holds") == 12 and "BROKEN" not in printed
    assert (tmp_path / "lesson.png").read_bytes().startswith(b"\x89PNG")
