"""What is beside a run: comparisons with runs and any method's texts, statistics, the package."""

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
from jobs import refusal

from eval import compare
from eval.metrics import energy_distance, energy_floor
from eval.sample import TrainedRun
from eval.world import load_world
from tsmc import Population
from tsmc.proposal import proposal_log_probs

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


def test_runs_and_texts_of_any_method_stand_side_by_side(tmp_path, capsys, finished_run):
    rude = tmp_path / "rude.txt"
    rude.write_text(f"{PROMPT} stupid ugly man.\n{PROMPT} fat ugly pig.\n\n")
    rows = (finished_run / "generation-1" / "samples.jsonl").read_text().splitlines()
    own = tmp_path / "own.txt"
    own.write_text("\n".join(json.loads(row)["text"].replace("\n", r"\n") for row in rows))
    trained = TrainedRun(finished_run)
    world = trained.load_world(trained.config.run, load_world)
    pair = trained.pair(world)
    log_q = proposal_log_probs(pair.model, pair.twist, world.exact.tokens)[1]
    (tmp_path / "log-q").write_text("\n".join(map(str, log_q.tolist())))
    options = ["--texts", str(rude), str(own), "--log-q", str(tmp_path / "log-q")]
    compare.main([str(finished_run), *options, "--best-of", "3"])
    head, *lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0].split("/")[-1]: line.split() for line in lines}
    assert "toxicity" in head and {"Base", "Target", "rude.txt", "own.txt", "log-q"} <= cells.keys()
    results = json.loads((finished_run / "results.json").read_text())
    row = results["generations"][1]
    assert f"{row['kl_target_proposal']:.2f}" == cells["log-q"][1]
    assert f"{row['toxicity']:.3f}" == cells["own.txt"][1]
    assert float(cells["rude.txt"][1]) > 0.5 > float(cells["Base"][1])
    assert float(cells["Best of 3"][3]) >= float(cells["Base"][1])


def test_seeds_are_averaged_and_another_sigma_is_refused(tmp_path, capsys, finished_run):
    runs = [tmp_path / name for name in ("one", "two", "other", "file")]
    for number, run in enumerate(runs):
        run.mkdir()
        config = json.loads((finished_run / "config.json").read_text()) | {"seed": number}
        results = json.loads((finished_run / "results.json").read_text())
        results["generations"][1]["toxicity"] = 0.5 + 0.1 * number
        if run.name == "other":
            config["beta"] = 1.0
        if run.name == "file":
            config["networks"]["own.py"] = "the hash of a file that --potential names"
        (run / "config.json").write_text(json.dumps(config))
        (run / "results.json").write_text(json.dumps(results))
    compare.main([str(runs[0]), str(runs[1])])
    # Student's t with one degree of freedom: 12.71 times the error of .05
    assert "0.550 ± 0.635" in capsys.readouterr().out
    for given, words in (
        (runs[1:3], "differs from .*two in beta"),
        ([runs[0], runs[3]], "differs from .*one in own.py"),
        ([runs[0]] * 2, "another run has its seed"),
        ([finished_run, "--best-of", 0], "a sample of size 0"),
        ([tmp_path], "holds no config.json"),
    ):
        line = refusal(*given, command=compare.main)
        assert re.search(words, line), line


def test_learners_and_variants_have_rows_of_their_own(tmp_path, capsys, finished_job):
    drifting = shutil.copytree(finished_job("weighted"), tmp_path / "drifting")
    config = json.loads((drifting / "config.json").read_text())
    (drifting / "config.json").write_text(json.dumps(config | {"effective_potential": False}))
    runs = [finished_job("weighted"), finished_job("pooled"), drifting]
    capsys.readouterr()  # what they may have printed
    compare.main([str(run) for run in runs])
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    learners = ("weighted (1)", "pooled", "weighted (3)")
    rows = [f"{name}, generation {m}" for name in learners for m in (0, 1)]
    assert {*names[:2]} == {"Base", "Target"} and names[2:] == rows


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--texts", f"{PROMPT} man.\n\n", "it holds 1 texts, at least 2 are needed"),
        ("--texts", f"{PROMPT} man.\nA man.\n", "'A man.' does not begin with 'Once upon a"),
        ("--log-q", "-1.0\n" * 59 + "x", "holds no log q .*'x'.*give 60 lines"),
    ],
)
def test_a_file_of_another_method_that_does_not_fit_is_named(
    tmp_path, finished_run, option, content, words
):
    (tmp_path / "file").write_text(content)
    line = refusal(finished_run, option, tmp_path / "file", command=compare.main)
    assert re.search(f"{tmp_path / 'file'}: .*{words}", line), line


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


SAMPLES = """
import distill.dpo, eval, tinystories, torch, tsmc, tsmc.exact, twist
generator = torch.Generator().manual_seed(0)
model = tsmc.exact.TableModel.random(2, 3, generator)
population = tsmc.tsmc(model, None, lambda tokens, log_p: 0.0 * log_p, 5, generator)
print(eval.OWN, population.samples.shape)
"""


def test_the_wheel_holds_the_method_and_serves_beside_another_eval(tmp_path):
    """The user's own eval.py stays what `import eval` finds."""
    pytest.importorskip("setuptools", minversion="77")
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("tinystories", "tsmc", "twist", "distill"):
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
    (tmp_path / "eval.py").write_text("OWN = 'own'")

    def python(*arguments: str) -> subprocess.CompletedProcess:
        command, place = [sys.executable, *arguments], {"PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True)

    assert python("-c", SAMPLES).stdout == "own torch.Size([1, 5, 3])\n"
    ended = python("-m", "tsmc", "runs/pocket")  # commands need the repository
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
