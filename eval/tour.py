"""Runs the code blocks of `docs/tour.md` and writes what they print below them. `python -m eval.tour`

Each ```python block is followed by a ```text block with its output. They run in order, in one namespace, at the repository's
root. The comparison takes words and whole numbers exactly, decimal numbers within a tolerance; `tests/test_tour.py` makes it.
"""

import contextlib
import io
import re
from itertools import zip_longest
from pathlib import Path

from eval.run.command import one_line_errors, say
from eval.run.options import OneLineParser
from tinystories.checkpoint import write_text

TOUR = Path(__file__).parent.parent / "docs" / "tour.md"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```$", re.DOTALL | re.MULTILINE)
DECIMAL = re.compile(r"-?\d+\.\d+")


def run_blocks(text: str) -> str:
    """The document with every block's output put in anew."""
    namespace: dict = {"__name__": "tour"}

    def run(block: re.Match) -> str:
        say(f"running the block of line {text.count(chr(10), 0, block.start())}")
        above = text.count("\n", 0, block.start("code"))  # so that a traceback names the document's line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * above + block["code"], str(TOUR), "exec"), namespace)
        return f"```python\n{block['code']}```\n\n```text\n{printed.getvalue()}```"

    return BLOCK.sub(run, text)


def agrees(written: str, found: str) -> bool:
    """Whether two lines say the same: decimal numbers within 2 % or one unit of the last digit, the rest exactly."""
    if DECIMAL.sub("#", written).split() != DECIMAL.sub("#", found).split():
        return False
    for a, b in zip(DECIMAL.findall(written), DECIMAL.findall(found), strict=True):
        unit = 10.0 ** -len(a.partition(".")[2])
        if not abs(float(a) - float(b)) <= max(1.01 * unit, 0.02 * abs(float(a))):
            return False
    return True


def differences(written: str, found: str) -> list[str]:
    """The lines that differ between two versions of the document, as "written -> found"."""
    pairs = zip_longest(written.splitlines(), found.splitlines(), fillvalue="")
    return [f"{a!r} -> {b!r}" for a, b in pairs if not agrees(a, b)]


def main() -> None:
    """Rewrite the outputs."""
    with one_line_errors("eval.tour"):
        OneLineParser(prog="eval.tour", description=__doc__.splitlines()[0]).parse_args()
        write_text(TOUR, run_blocks(TOUR.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
