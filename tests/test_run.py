"""What a run writes and reads: exact samples of the target, whole files, progress, summaries.

What belongs to the user is neither lost nor overwritten.
"""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.axes import Axes

from eval import summary
from eval.figures import histogram
from eval.metrics import Samples
from eval.run.evaluate import evaluate_generation
from eval.run.options import RunConfig
from eval.run.run import Progress, Run
from eval.run.setup import load_target, save_target
from tinystories.checkpoint import replacing, write_json, write_text
from tinystories.errors import InputError
from tsmc import ExactSamples, Phases, Population

KEY = {"lm": "a" * 64, "toxicity": "b" * 64, "prompt": "Once", "length": 3, "beta": 10.0}
KEY |= {"potential": ["toxicity"]}
TOKENS = torch.tensor([[1, 2, 3], [3, 2, 1]])
TARGET = ExactSamples(TOKENS, torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04)


def test_a_target_survives_its_files_and_serves_its_own_sigma(tmp_path):
    save_target(tmp_path, TARGET, KEY, seed=0)
    again = load_target(tmp_path, KEY, 9)
    assert torch.equal(again.tokens, TARGET.tokens) and torch.equal(again.log_phi, TARGET.log_phi)
    assert (again.num_proposals, again.log_z, again.log_z_std_error) == (900, -7.5, 0.04)
    for other in ({"beta": 1.0}, {"length": 4}, {"prompt": "Two"}, {"potential": ["regex:a"]}):
        assert load_target(tmp_path, KEY | other, 9) is None
    for role in ("lm", "toxicity"):
        with pytest.raises(InputError, match=f"stale, it was made for another {role} checkpoint"):
            load_target(tmp_path, KEY | {role: "c" * 64}, 9)
    content = (tmp_path / "samples.safetensors").read_bytes()
    (tmp_path / "samples.safetensors").write_bytes(content[:-1] + b"?")
    with pytest.raises(InputError, match=r"samples\.safetensors: .*another sha256"):
        load_target(tmp_path, KEY, 9)


IMPOSSIBLE = [{"key": {"lm": "a", "more": 1}}, {"num_proposals": 1}]
IMPOSSIBLE += [{"log_z": math.nan}, {"log_z_std_error": 10**400}]


@pytest.mark.parametrize("values", IMPOSSIBLE)
def test_impossible_values_in_a_target_are_refused(tmp_path, values):
    save_target(tmp_path, TARGET, KEY, seed=0)
    path = tmp_path / "target.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(InputError, match=r"target\.json: not a target file"):
        load_target(tmp_path, KEY, 9)


@pytest.mark.parametrize("change", [[TOKENS + 6], [TOKENS[:, :2]], [TOKENS, TARGET.log_phi + 1]])
def test_impossible_samples_of_a_target_are_refused(tmp_path, change):
    exact = dataclasses.replace(TARGET, **dict(zip(("tokens", "log_phi"), change, strict=False)))
    save_target(tmp_path, exact, KEY, seed=0)
    with pytest.raises(InputError, match=r"samples\.safetensors: .* do not fit target\.json"):
        load_target(tmp_path, KEY, 9)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with pytest.raises(InputError, match="cannot be written"), replacing(tmp_path / "file"):
        raise OSError(28, "No space left on device")
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"kl": float("nan")})
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_progress_keeps_every_step_and_refuses_what_is_not_finite(capsys):
    progress = Progress(True)
    progress.plan = {("base samples", None): 10.0, ("twist learning", 0): 30.0, ("other", 0): 50.0}
    progress.begin(("twist learning", 0), 3)
    for ess in (1.0, 2.0, 3.0):
        progress(loss=torch.tensor(0.5), ess=ess)
    with pytest.raises(InputError, match="step 4: loss is nan; lower the learning rate"):
        progress(loss=torch.tensor(torch.nan))
    assert [record["ess"] for record in progress.records] == [1.0, 2.0, 3.0]
    place = {"phase": "twist learning", "generation": 0}
    assert progress.records[2] == place | {"step": 3, "loss": 0.5, "ess": 3.0}
    progress.start -= 600.0  # the phase takes ten minutes, so what is left takes 50 / 30 as long
    assert 600 <= progress.end() < 630
    line = "phase 2 of 3, generation 0, twist learning, 10 min, loss 0.5, ess 3, about 17 min left"
    assert capsys.readouterr().err == f"{line}\n"


def fake_run(path: Path, seed: int, kl: float, **options) -> Path:
    """The directory of a run that holds no more than its options and results."""
    row = {"toxicity": 0.5, "similarity": 0.4, "kl_target_proposal": kl, "ess": 5.0}
    target = {"toxicity": 0.9, "similarity": 0.3, "log_z": -7.5, "num_samples": 500}
    generations = [row, row | {"kl_target_proposal": kl - 2}]
    write_json(path / "config.json", {"seed": seed, "out": str(path), "beta": 10.0} | options)
    results = {"base": {"toxicity": 0.01, "similarity": 0.5}, "target": target}
    write_json(path / "results.json", results | {"generations": generations})
    return path


def test_the_summary_averages_runs_and_pairs_the_change(tmp_path):
    paths = [fake_run(tmp_path / str(seed), seed, kl) for seed, kl in enumerate((8.0, 9.0, 10.0))]
    lines = summary.summarise(summary.read_runs(paths)).splitlines()
    assert lines[1].split() == ["Base", "0.010", "0.500"]
    assert "9.00 +- 2.48" in lines[3], "Student's t, two degrees of freedom: 4.303 / sqrt(3)"
    assert "-2.00" in lines[5] and "-2.00 +-" not in lines[5]
    paths.append(fake_run(tmp_path / "other", 3, 8.0, beta=1.0))
    with pytest.raises(InputError, match=r"differs from .* in beta"):
        summary.read_runs(paths)


def test_what_holds_no_results_is_refused_by_name(tmp_path):
    path = fake_run(tmp_path / "run", 0, 8.0)
    write_json(path / "results.json", {"base": {}, "generations": [{"toxicity": "x"}]})
    with pytest.raises(InputError, match=r"results\.json: holds no results of a run"):
        summary.read_runs([path])


def new_run(path: Path) -> Run:
    return Run(RunConfig(out=str(path), quiet=True), None, {})


def test_a_run_draws_what_plain_phases_draw(tmp_path):
    draw = lambda size, source: {"tokens": torch.randn(size, generator=source)}  # noqa: E731
    with Run(RunConfig(out=str(tmp_path / "run"), quiet=True, rows=3), None, {}) as run:
        found = run.draw("draw", 8, 8, draw)["tokens"]
    assert torch.equal(found, Phases(0, rows=3).draw("draw", 8, 8, draw)["tokens"])


@pytest.mark.parametrize("how", ["deleted", "replaced", "moved"])
def test_a_run_whose_directory_is_another_one_writes_nothing_there(tmp_path, how):
    with new_run(tmp_path / "run") as run:
        if how == "moved":
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(tmp_path / "run")
        if how == "replaced":
            new_run(tmp_path / "run").__exit__(None, None, None)
        before = sorted(path.name for path in tmp_path.glob("run/*"))
        with pytest.raises(InputError, match="moved, deleted or replaced"):
            run.add_samples([{"text": "a"}])
        with pytest.raises(InputError, match="moved, deleted or replaced"):
            run.once("phase", 0, 1, lambda generator, report: {"x": torch.zeros(1)})
        with pytest.raises(InputError, match="moved, deleted or replaced"):
            run.finish({})
    assert sorted(path.name for path in tmp_path.glob("run/*")) == before


def test_resuming_and_finishing_remove_only_what_the_run_wrote(tmp_path):
    run = tmp_path / "run"
    with new_run(run) as unfinished:
        unfinished.once("phase", 0, 1, lambda generator, report: {"x": torch.zeros(1)})
    names = [".results.json.original", ".2024-notes.markdown", ".tmpbackup", "resume/my-notes.txt"]
    names += ["notes/.data.csv.123.tsmc-partial", "resume/own.safetensors"]
    for name in names:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    (run / "resume" / ".x.safetensors.7.tsmc-partial").write_text("left behind")
    with Run(RunConfig(out=str(run), quiet=True), run, {}) as resumed:
        resumed.once("phase", 0, 1, lambda generator, report: {"x": torch.ones(1)})
        resumed.finish({})
    assert all((run / name).read_text() == "mine" for name in names)
    assert sorted(os.listdir(run / "resume")) == ["my-notes.txt", "own.safetensors"]


@pytest.mark.parametrize("values", [[-30.0, -0.1], [0.5, 4.0], [2.0, 2.0]])
def test_the_histogram_holds_every_score(tmp_path, monkeypatch, values):
    drawn, stairs = [], Axes.stairs

    def recorded(axes, shares, edges, **look):
        drawn.append(shares)
        return stairs(axes, shares, edges, **look)

    monkeypatch.setattr(Axes, "stairs", recorded)
    histogram({"Base": values}, "log_phi", tmp_path / "figure.png")
    assert drawn[0].sum() == pytest.approx(1) and (tmp_path / "figure.png").exists()


def test_texts_of_dead_runs_count_as_scored():
    """Two runs of two particles, one run dead: four texts are scored, two with weight remain."""
    tokens = torch.arange(4).view(2, 2, 1)
    log_weights = torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]])
    log_z = torch.tensor([0.0, -math.inf])
    ancestors = torch.tensor([[0, 1], [0, 1]])
    ess = torch.tensor([2.0, 0.0])
    population = Population(tokens, log_weights, log_weights, ancestors, tokens, log_z, ess)
    scores = {"log_phi": torch.zeros(2).double()}
    setup = SimpleNamespace(exact=None, exact_vectors=None, encode=lambda texts: torch.eye(2))
    setup.score = lambda rows, group: Samples(["a", "b"], scores, group)
    row, _ = evaluate_generation(setup, None, None, 0, population)
    assert row["worth"] == 0.5 and row["dead_runs"] == 1
    assert math.isnan(row["log_z_hat_std"]) and "log_z_half_width" not in row, "of one run alone"
