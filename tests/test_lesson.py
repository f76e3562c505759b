"""The lesson runs, its estimates agree with the oracle, and its figure is written."""

import re
import sys

from eval import lesson
from tsmc import SCHEMES


def test_every_estimate_agrees_and_the_figure_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lesson, "RUNS", 200)
    monkeypatch.setattr(sys, "argv", ["lesson", "--out", f"{tmp_path}/lesson.png", "--seed", "1"])
    lesson.main()
    printed = capsys.readouterr().out
    distances = [float(value) for value in re.findall(r"([+-][0-9.]+) errors apart", printed)]
    assert len(distances) == 7 + len(SCHEMES) and max(map(abs, distances)) < 4
    assert printed.count("holds") == 12 and "BROKEN" not in printed
    assert (tmp_path / "lesson.png").read_bytes().startswith(b"\x89PNG")
