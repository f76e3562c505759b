"""What belongs to the user is neither lost nor overwritten, and its faults are one line."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from eval.run.options import RunConfig
from eval.run.run import Run
from eval.scorers.potentials import user_factor
from tinystories.errors import InputError


def new_run(path: Path) -> Run:
    return Run(RunConfig(out=str(path), quiet=True), None, {})


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


def test_a_potential_may_not_change_how_tensors_are_made(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\ndef f(texts):\n    torch.set_default_dtype(torch.float64)\n"
        "    torch.set_grad_enabled(False)\n    return torch.zeros(len(texts))"
    )
    value = user_factor(f"{path}:f").log_phi(["a", "b"])
    assert type(value) is torch.Tensor and value.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
