"""The tour and its notebook say what their code prints, name functions that exist; the comparison notices what it should."""

import base64
import contextlib
import io
import json
import re
import sys
import time
from pathlib import Path

import pytest

from eval.tour import BLOCK, NOTEBOOK, PICTURE, TOUR, differences, notebook, run_blocks

ROOT = TOUR.parent.parent


@pytest.fixture
def tour() -> str:
    return TOUR.read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A folder that looks like the repository and may be written to; the notebook starts in its docs/, as Jupyter would."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "docs").mkdir()
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for name in ("tour.md", "tiny.py"):
        (tmp_path / "docs" / name).symlink_to(ROOT / "docs" / name)
    monkeypatch.chdir(tmp_path / "docs")
    return tmp_path


def test_every_cell_prints_what_stands_below_it_and_draws_its_picture(copy, tour):
    namespace, began = {"__name__": "notebook"}, time.thread_time()
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), namespace)
            written = "".join(line for output in cell["outputs"] for line in output["text"])
            assert differences(written, printed.getvalue()) == [], "rewrite the outputs with python -m eval.tour"
    assert time.thread_time() - began < 60, "the tour takes under a minute"
    drawn = {picture.name for picture in (copy / "docs").glob("*.png")}
    assert drawn == set(PICTURE.findall(tour)) and len(drawn) == 2


def test_the_notebook_is_the_tour(tour):
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert found == notebook(tour, TOUR.parent), "make it again with python -m eval.tour"
    assert found["nbformat"] == 4 and len(found["cells"]) > 2 * len(BLOCK.findall(tour))


def test_a_notebook_has_all_text_code_outputs_and_pictures(tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture")
    text = "# T\n\n```python\nx = 2\nprint(x)\n```\n\n```text\n2\n```\n\n![what it shows](a.png)\n"
    root, title, code, picture = notebook(text, tmp_path)["cells"]
    assert "os.chdir(root)" in "".join(root["source"]) and root["outputs"] == []
    assert title["source"] == ["# T"] and code["source"] == ["x = 2\n", "print(x)"]
    assert code["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["2\n"]}]
    assert picture["source"] == ["![what it shows](attachment:a.png)"]
    assert base64.b64decode(picture["attachments"]["a.png"]["image/png"]) == b"picture"


def test_every_question_has_its_answer(tour):
    questions, answers = tour.count("**Predict first:**"), tour.count("<details><summary>Answer</summary>\n\n")
    assert questions == answers == tour.count("\n</details>\n") > 3


def test_every_fence_belongs_to_a_block_that_is_run(tour):
    assert tour.count("```") == 4 * len(BLOCK.findall(tour)) > 0


def test_every_number_of_the_prose_stands_in_a_block(tour):
    blocks = "".join(code + output for code, output in BLOCK.findall(tour))
    prose = re.sub(r"^ {4}.*$", "", BLOCK.sub("", tour), flags=re.MULTILINE)  # without equations set apart
    prose = re.sub(r"\b(eq\.|Sec\.|Algorithm) \d|\(eq\. \d\)", "", prose)
    missing = [number for number in re.findall(r"\d[\d,.]*\d|\d", prose) if not re.search(rf"\b{number}\b", blocks)]
    assert not missing


def test_every_function_named_is_where_the_tour_says(tour):
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)`", tour)
    assert len(named) > 15
    for path, name in named:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            path,
            name,
        )


@pytest.mark.parametrize("found", ["log Z -7.49, 5 kept", "log  Z -7.35, 5 kept", "log Z -7.48, 5 kept"])
def test_rounding_and_columns_make_no_difference(found):
    assert differences("log Z -7.48, 5 kept", found) == []


@pytest.mark.parametrize(
    "found",
    [
        "log Z -7.78, 5 kept",
        "log Z 7.48, 5 kept",
        "log Z -7.48, 6 kept",
        "log Z -7.48, 5 drawn",
        "log Z nan, 5 kept",
        "",
    ],
)
def test_another_word_or_number_is_noticed(found):
    assert differences("log Z -7.48, 5 kept", found)


def test_a_missing_or_additional_line_is_noticed():
    assert differences("a\nb", "a") and differences("a", "a\nb")


def test_outputs_are_replaced_and_code_is_kept():
    text = "# T\n\n```python\nx = 2\nprint(x)\n```\n\n```text\n```\n\n"
    text += "```python\nprint(x + 1)\n```\n\n```text\nstale\n```\nend\n"
    written = run_blocks(text)
    assert [output for _, output in BLOCK.findall(written)] == ["2\n", "3\n"]
    assert BLOCK.sub("", written) == BLOCK.sub("", text) and run_blocks(written) == written
