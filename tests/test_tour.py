"""The tour says what its code prints, names functions that exist, and its comparison notices what it should."""

import re

import pytest

from eval.tour import BLOCK, TOUR, differences, run_blocks

ROOT = TOUR.parent.parent


@pytest.fixture
def tour() -> str:
    return TOUR.read_text(encoding="utf-8")


def test_every_block_prints_what_stands_below_it(tour, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert differences(tour, run_blocks(tour)) == [], "rewrite the outputs with python -m eval.tour"


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
