"""The two ways to KL(sigma||q), on the generations of a small run."""

import sys

import pytest

from eval import agreement
from main import main


def test_bounds_and_rejection_are_printed_for_every_generation(tmp_path, capsys, monkeypatch):
    small = ["--generations", "1", "--pool-base-draws", "8", "--pool-rounds", "1", "--pool-draws", "8"]
    small += ["--pool-updates", "2", "--pool-batch-size", "4", "--eval-runs", "2", "--eval-particles", "4"]
    main([*small, "--eval-base-samples", "8", "--out", str(tmp_path / "run")])
    options = ["--particles", "4", "--runs", "3", "--exact-samples", "3"]
    monkeypatch.setattr(sys, "argv", ["agreement", str(tmp_path / "run"), *options])
    capsys.readouterr()
    agreement.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum("rejection" in line for line in lines) == 4, "base, two generations, log Z"
    assert sum("bounds" in line for line in lines) == 4
    base = next(line for line in lines if line.startswith("Base"))
    assert 5.0 < float(base.split("rejection")[1].split()[0]) < 6.0, (
        "KL(sigma||p) of the pocket preset does not depend on the run"
    )


@pytest.mark.parametrize(("option", "words"), [(["--runs", "1"], "at least 2"), ([], "config.json: no such file")])
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, option, words):
    monkeypatch.setattr(sys, "argv", ["agreement", str(tmp_path / "none"), *option])
    with pytest.raises(SystemExit) as ended:
        agreement.main()
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and words in lines[0]
