"""What others use of the project: trained pairs from a program, any method's texts as a row, sets of runs side by side."""

import dataclasses
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

import tinystories
from eval import load_run, score, summary
from eval.metrics import energy_distance, energy_floor, log_mean_z
from eval.run.options import POCKET, RunConfig, saved_config
from eval.run.saved import save_twist
from tinystories.checkpoint import write_json
from tinystories.errors import InputError
from tsmc import Population
from twist import EmbeddingTwist

ROOT = Path(__file__).parents[1]
PROMPT = "Once upon a time, there was a"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose twist is tied to the embeddings and random."""
    path = tmp_path_factory.mktemp("runs") / "pooled"
    write_json(path / "config.json", dataclasses.asdict(RunConfig(length=6)))
    model, tokenizer = tinystories.load(POCKET / "lm")
    twist = EmbeddingTwist(16, model.wte.weight, torch.Generator().manual_seed(0))
    torch.nn.init.normal_(twist.shift.last.weight, std=0.01, generator=torch.Generator().manual_seed(1))
    tinystories.save(path / "generation-0", model, tokenizer)
    save_twist(path / "generation-0", twist)
    return path


def test_a_run_is_sampled_from_a_program(run):
    trained = load_run(run)
    drawn = trained.sample("The dog", particles=5, runs=3, length=4)
    assert len(drawn.texts) == 15 and all(text.startswith("The dog") for text in drawn.texts)
    assert drawn.log_weights.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert drawn.population.tokens.shape == (3, 5, 4)
    shares = drawn.population.log_z.double().softmax(0)[:, None] * drawn.population.log_weights.double().softmax(-1)
    torch.testing.assert_close(drawn.log_weights.exp(), shares.flatten())
    assert trained.sample(particles=2, runs=1).texts[0].startswith(PROMPT), "the run's own prompt"
    assert trained.sample("The dog", 5, 3, 4).texts == drawn.texts != trained.sample("The dog", 5, 3, 4, seed=1).texts


def test_dead_runs_take_no_share():
    """Of three runs one is dead, of the others one particle: the pooled weights are those of what is alive."""
    alive = torch.tensor([[0.0, -1.0], [-torch.inf, 2.0], [-torch.inf, -torch.inf]])
    log_z = torch.tensor([-3.0, -4.0, -torch.inf])
    nothing = torch.zeros(3, 2, dtype=torch.long)
    rest = {"log_phi": alive, "ancestors": nothing, "samples": nothing, "ess": torch.zeros(3)}
    population = Population(nothing[..., None], log_weights=alive, log_z=log_z, **rest)
    z = log_z.double().exp()
    expected = torch.tensor([[1.0, math.exp(-1)], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    expected *= torch.tensor([1 / (1 + math.exp(-1)), 1.0, 0.0])[:, None] * z[:, None] / z.sum()
    torch.testing.assert_close(population.shares(), expected)
    assert population.log_mean_z() == pytest.approx(math.log(z.sum() / 3))
    dead = {"log_weights": torch.full((3, 2), -torch.inf), "log_z": torch.full((3,), -torch.inf)}
    none = Population(nothing[..., None], **dead, **rest)
    assert not none.shares().any() and none.log_mean_z() == -math.inf


def test_a_generation_that_is_not_there_is_named(run, tmp_path):
    with pytest.raises(InputError, match="generation 3 is not in"):
        load_run(run, 3)
    with pytest.raises(InputError, match=str(tmp_path)):
        load_run(tmp_path)


def test_texts_of_any_method_get_the_row_of_the_table(tmp_path, capsys):
    (tmp_path / "kind.txt").write_text(f"{PROMPT} kind girl who liked to play.\n{PROMPT} happy cat named Tom.\n\n")
    (tmp_path / "rude.txt").write_text(f"{PROMPT} stupid ugly man.\n{PROMPT} fat ugly pig, and everyone hated him.\n")
    score.main([str(tmp_path / "kind.txt"), str(tmp_path / "rude.txt")])
    head, target, kind, rude = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["texts", "toxicity", "log_phi", "similarity", "energy", "distance"]
    assert target[0] == "Target" and target[1] == "530" and target[-1] == "0.000" and kind[1] == rude[1] == "2"
    assert float(kind[2]) < 0.1 < 0.5 < float(rude[2]) and float(rude[-1]) > 0


@pytest.mark.parametrize("content", [b"one line\n", b"", b"\xff\xfe\n\xff"])
def test_a_file_without_texts_is_one_line(tmp_path, capsys, content):
    (tmp_path / "few.txt").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        score.main([str(tmp_path / "few.txt")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "few.txt" in line


def finished(path: Path, seed: int, kl: float, **options: object) -> str:
    """A run's options and results, with one number that matters."""
    row = {"toxicity": 0.5, "similarity": 0.4, "kl_target_proposal": kl}
    write_json(path / "config.json", dataclasses.asdict(RunConfig(seed=seed)) | options)
    write_json(path / "results.json", {"base": {"toxicity": 0.1, "similarity": 0.4}, "generations": [row, row]})
    return str(path)


def test_two_sets_of_runs_are_compared_and_their_options_named(tmp_path, capsys):
    ours = [finished(tmp_path / f"a{seed}", seed, 2.0 + 0.1 * seed) for seed in range(3)]
    theirs = [finished(tmp_path / f"b{seed}", seed, 3.0 + 0.1 * seed, generations=4) for seed in range(3)]
    summary.main([*ours, "--against", *theirs])
    out = capsys.readouterr().out
    assert "Against these runs, generations 4:" in out
    last = out.splitlines()[-1]
    assert last.startswith("Generation 1") and re.search(r"-1\.00 \+- 0\.23$", last)  # Welch: t_4(0.975) * 0.0816
    with pytest.raises(SystemExit):
        summary.main([*ours, *theirs[:1]])


def test_the_energy_distance_sees_laws_and_not_copies():
    source = torch.Generator().manual_seed(0)
    y, same, other = (torch.randn(400, 3, generator=source) for _ in range(3))
    apart = torch.arange(400)
    floor = energy_floor(y, source)
    assert abs(energy_distance(same, y, apart)) < 2 * floor < 0.1 * energy_distance(other + 1, y, apart)
    exact = 2 * (other + 1)[:, None].sub(y).norm(dim=-1).mean() - sum(
        z[:, None].sub(z).norm(dim=-1).sum() / (400 * 399) for z in (other + 1, y)
    )
    assert energy_distance(other + 1, y, apart) == pytest.approx(exact.item(), abs=1e-5)
    copies, runs = same[:100].repeat_interleave(4, 0), torch.arange(100).repeat_interleave(4)
    assert abs(energy_distance(copies, y, runs)) < 4 * floor, "copies within a run say nothing of its law"


def test_the_mean_of_z_hat_counts_the_dead():
    log_z = torch.tensor([-3.0, -4.0, -torch.inf, -torch.inf], dtype=torch.float64)
    value, half_width = log_mean_z(log_z)
    mean = log_z.exp().mean()
    assert value == pytest.approx(mean.log().item()) and half_width == pytest.approx(
        3.1824463 * log_z.exp().std().item() / 2 / mean.item(), rel=1e-4
    )


@pytest.mark.slow
def test_the_wheel_holds_the_checkpoints_and_the_pages(tmp_path):
    """Built without the network; what is in it is all that an installation has."""
    pytest.importorskip("setuptools", minversion="77")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "runs", "build"))
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q", "-w"]
    subprocess.run([*build, str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    kept = subprocess.run(
        ["git", "ls-files", "eval", "checkpoints"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(kept.stdout.split()) <= names and {"main.py", "tsmc/py.typed"} <= names


def test_options_of_a_saved_run_are_those_of_this_version(run):
    assert (
        saved_config(run) == RunConfig(length=6) and json.loads((run / "config.json").read_text())["method"] == "pooled"
    )
