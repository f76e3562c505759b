"""Runs the code blocks of `docs/tour.md`, writes what they print below them, makes a notebook of it all. `python -m eval.tour`

Each ```python block is followed by a ```text block with its output. They run in order, in one namespace, at the repository's
root. In `docs/tour.ipynb` each pair is a code cell with its output, what stands between them is Markdown, and the pictures that
the blocks have drawn are inside. The comparison takes words and whole numbers exactly, decimal numbers within a tolerance;
`tests/test_tour.py` makes it.
"""

import base64
import contextlib
import io
import json
import re
from itertools import zip_longest
from pathlib import Path

from eval.run.command import one_line_errors, say
from eval.run.options import OneLineParser
from tinystories.checkpoint import write_text

TOUR = Path(__file__).parent.parent / "docs" / "tour.md"
NOTEBOOK = TOUR.with_suffix(".ipynb")
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"\]\((?P<file>[\w-]+\.png)\)")
DECIMAL = re.compile(r"-?\d+\.\d+")
AT_THE_ROOT = """\
import os
import sys
from pathlib import Path

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "docs" / "tour.md").exists())
os.chdir(root)
sys.path.insert(0, str(root))
"""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


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


def markdown_cell(text: str, folder: Path) -> list[dict]:
    """The text as a cell with its pictures, which lie in `folder`; none where there is no text."""
    pictures = {file: (folder / file).read_bytes() for file in PICTURE.findall(text)}
    attached = {file: {"image/png": base64.b64encode(data).decode()} for file, data in pictures.items()}
    source = PICTURE.sub(r"](attachment:\g<file>)", text.strip()).splitlines(keepends=True)
    cell = {"cell_type": "markdown", "metadata": {}, "source": source}
    return [cell | ({"attachments": attached} if attached else {})] if source else []


def code_cell(code: str, output: str) -> dict:
    """A block as a cell with what it has printed."""
    printed = [{"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}] if output else []
    source = code.rstrip("\n").splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": printed, "source": source}


def notebook(text: str, folder: Path) -> dict:
    """The document as a notebook (nbformat 4.4); its first cell goes to the repository's root."""
    cells, end = [code_cell(AT_THE_ROOT, "")], 0
    for block in BLOCK.finditer(text):
        cells += [*markdown_cell(text[end : block.start()], folder), code_cell(block["code"], block["output"])]
        end = block.end()
    cells += markdown_cell(text[end:], folder)
    return {"cells": cells, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 4}


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
    """Rewrite the outputs, the pictures and the notebook."""
    with one_line_errors("eval.tour"):
        OneLineParser(prog="eval.tour", description=__doc__.splitlines()[0]).parse_args()
        text = run_blocks(TOUR.read_text(encoding="utf-8"))
        write_text(TOUR, text)
        write_text(NOTEBOOK, json.dumps(notebook(text, TOUR.parent), indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {TOUR} and {NOTEBOOK}")


if __name__ == "__main__":
    main()
