"""The tour says what its code prints, draws the pictures that it shows, and names what exists."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

TOUR = Path(__file__).parents[1] / "docs" / "tour.ipynb"
CELLS = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
TEXT = "\n\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
DECIMAL = re.compile(r"-?\d+\.\d+")


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A copy of what the tour reads; the notebook starts in its docs/, as Jupyter would."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "docs").mkdir()
    (tmp_path / "checkpoints").symlink_to(TOUR.parents[1] / "checkpoints")
    for name in ("tour.ipynb", "tiny.py"):
        (tmp_path / "docs" / name).symlink_to(TOUR.with_name(name))
    monkeypatch.chdir(tmp_path / "docs")
    yield tmp_path
    torch.set_default_dtype(torch.float32)


def test_every_cell_prints_what_stands_below_it(copy):
    """Numbers up to rounding, everything else to the letter."""
    namespace = {"__name__": "notebook"}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec("".join(cell["source"]), namespace)
            found = printed.getvalue()
            expected = "".join(line for output in cell["outputs"] for line in output["text"])
            assert DECIMAL.sub("#", found).split() == DECIMAL.sub("#", expected).split()
            for a, b in zip(DECIMAL.findall(found), DECIMAL.findall(expected), strict=True):
                unit = 10.0 ** -len(b.partition(".")[2])
                assert float(a) == pytest.approx(float(b), rel=0.02, abs=1.01 * unit), (a, b)
    drawn = {picture.name for picture in (copy / "docs").glob("*.png")}
    assert drawn == set(re.findall(r"\(([\w-]+\.png)\)", TEXT)) and len(drawn) == 2


def test_every_link_and_every_function_is_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "https://" not in link]
    assert len(links) > 5 and all((TOUR.parent / link).exists() for link in links)
    named = re.findall(r"`([\w/]+\.py)`:\s+`(\w+)`", TEXT)
    assert len(named) > 15
    for path, name in named:
        code = (TOUR.parents[1] / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\b", code, re.MULTILINE), (path, name)
