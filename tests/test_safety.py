"""What belongs to the user is neither lost nor overwritten, and its faults are one line."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from jobs import PUBLISHED, refusal
from tokenizers import Tokenizer, models

from eval.run.options import POCKET, RunConfig
from eval.run.run import Run
from eval.scorers.potentials import user_factor
from tinystories.errors import InputError
from tinystories.tokenizer import tokenizing


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


def test_damaged_results_of_an_unfinished_run_cost_it_nothing(tmp_path):
    with new_run(tmp_path / "run") as unfinished:
        unfinished.once("phase", 0, 1, lambda generator, report: {"x": torch.zeros(1)})
    for damaged in ('{"generations": [{"toxicity": "x"}]}', '{"base"'):
        (tmp_path / "run" / "results.json").write_text(damaged)
        assert f"{tmp_path / 'run' / 'results.json'}: " in refusal("--resume", tmp_path / "run")
        assert os.listdir(tmp_path / "run" / "resume") == ["0-phase.safetensors"]


def test_a_linked_file_is_not_written_through_and_a_pipe_is_refused(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    with new_run(tmp_path / "run") as run:
        (tmp_path / "run" / "metrics.jsonl").symlink_to(precious)
        run.log([{"step": 1}])
        assert precious.read_text() == "mine"
        (tmp_path / "run" / "samples.jsonl").unlink(missing_ok=True)
        os.mkfifo(tmp_path / "run" / "samples.jsonl")
        with pytest.raises(InputError, match="not a regular file"):
            run.add_samples([{"text": "a"}])


def test_a_potential_may_not_change_how_tensors_are_made(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\ndef f(texts):\n    torch.set_default_dtype(torch.float64)\n"
        "    torch.set_grad_enabled(False)\n    return torch.zeros(len(texts))"
    )
    value = user_factor(f"{path}:f").log_phi(["a", "b"])
    assert type(value) is torch.Tensor and value.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


def test_a_tokenizer_that_fails_for_a_text_is_one_line():
    without_unknown = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    fails = pytest.raises(InputError, match="Network: its tokenizer fails for a text")
    with fails, tokenizing("Network"):
        without_unknown.encode("b")


def test_many_quick_interrupts_end_a_run_in_one_line(tmp_path):
    """Twenty-five times Ctrl-C while it samples: one line, and the run continues later."""
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(POCKET.parents[1])!r})
        from main import main
        main({[*PUBLISHED, "--ctl-updates", "100000", "--out", str(tmp_path / "run")]!r})
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "resume").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    for _ in range(25):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    said = process.communicate(timeout=60)[1].strip().splitlines()
    assert process.returncode == 130
    assert len(said) == 1 and "continue with --resume" in said[0], said
