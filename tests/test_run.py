"""What a run writes and reads: exact samples of the target, whole files, rows and figures."""

import json
import math

import pytest
import torch
from matplotlib.axes import Axes

from eval.config import build
from eval.evaluate import population_row
from eval.figures import histogram
from eval.run import Run, read_lines
from eval.world import load_target, save_target
from tinystories.checkpoint import read_json, replacing, write_json, write_text
from tinystories.errors import InputError
from tsmc import ExactSamples, Population

KEY = {"lm": "a" * 64, "toxicity": "b" * 64, "prompt": "Once", "length": 3, "beta": 10.0}
KEY |= {"potential": ["toxicity"]}
TOKENS = torch.tensor([[1, 2, 3], [3, 2, 1]])
TARGET = ExactSamples(TOKENS, torch.tensor([-0.5, -0.25]), 900, -7.5, 0.04)


def test_a_target_survives_its_files_and_serves_its_own_sigma(tmp_path):
    save_target(tmp_path, TARGET, KEY)
    again = load_target(tmp_path, KEY)
    assert torch.equal(again.tokens, TARGET.tokens) and torch.equal(again.log_phi, TARGET.log_phi)
    assert (again.num_proposals, again.log_z, again.log_z_std_error) == (900, -7.5, 0.04)
    others = [{"beta": 1.0}, {"length": 4}, {"prompt": "Two"}, {"potential": ["regex:a"]}]
    for other in [*others, {"lm": "c" * 64}, {"toxicity": "c" * 64}, {"end": "."}]:
        assert load_target(tmp_path, KEY | other) is None
    content = (tmp_path / "samples.safetensors").read_bytes()
    (tmp_path / "samples.safetensors").write_bytes(content[:-1] + b"?")
    with pytest.raises(InputError, match=r"samples\.safetensors: .*another sha256"):
        load_target(tmp_path, KEY)


@pytest.mark.parametrize("values", [{"key": 5}, {"log_z_std_error": 10**400}])
def test_impossible_values_in_a_target_are_refused(tmp_path, values):
    save_target(tmp_path, TARGET, KEY)
    path = tmp_path / "target.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(InputError, match=r"target\.json: not a target file"):
        load_target(tmp_path, KEY)


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


def test_a_folder_is_there_completely_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Run(build({}), None) as run, Run(build({}), None) as second:
        assert [str(one.path) for one in (run, second)] == ["runs/pocket", "runs/pocket-2"]
        for m in (None, 0):
            with pytest.raises(RuntimeError), run.writing(m, {"kl": 1.0}, []) as folder:
                (folder / "half").write_text("half")
                raise RuntimeError
            assert not run.folder(m).exists() and run.last() is None
        with run.writing(0, {"kl": math.nan}, [{"text": "a", "log_phi": -math.inf}]) as folder:
            (folder / "twist").write_text("whole")
        assert run.last() == 0 and run.read_row(0) == {"kl": None}
        assert read_lines(run.folder(0) / "samples.jsonl") == [{"text": "a", "log_phi": None}]
        assert {path.name for path in run.path.glob("generation-0/*")} == {
            *("row.json", "samples.jsonl", "metrics.jsonl", "twist")
        }
        with pytest.raises(InputError, match="another process is writing there"):
            Run(build({}), run.path)
    read_json(run.path / "config.json")


def test_progress_keeps_every_step_and_refuses_what_is_not_finite(tmp_path, capsys):
    with Run(build({"out": str(tmp_path / "run"), "generations": 3}), None) as run:
        for ess in (1.0, 2.0, 3.0):
            run("twist learning", 1, 3, loss=torch.tensor(0.5), ess=ess)
        fault = "generation 1, twist learning, step 4: loss is nan; lower the learning rate"
        with pytest.raises(InputError, match=fault):
            run("twist learning", 1, 3, loss=torch.tensor(torch.nan))
        place = {"phase": "twist learning", "generation": 1}
        steps = [{"step": step, "loss": 0.5, "ess": float(step)} for step in (1, 2, 3)]
        assert run.records == [place | step for step in steps]
        run.start -= 600.0  # the generation takes ten minutes, as each of the two others will
        run.say_time(1, {"toxicity": 0.25, "log_phi": None})
        *_, line = capsys.readouterr().err.splitlines()
        assert line == "generation 1: 600 s, toxicity 0.25, about 1200 s left"
        with run.writing(1, {}, []):
            pass
        assert run.records == [] and len(read_lines(run.folder(1) / "metrics.jsonl")) == 3


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
    row = population_row(population)
    assert row["worth"] == 0.5 and row["dead_runs"] == 1 and row["largest_share"] == 0.5
    assert math.isnan(row["log_z_hat_std"]), "of one run alone"
