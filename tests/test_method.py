"""docs/method.md: every link names a function that is there, and every equation can be found from the code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[`(\w+)`\]\(([\w./]+\.py)\)")
CODE = [
    path
    for folder in ("tinystories", "tsmc", "twist", "distill", "eval")
    for path in (ROOT / folder).rglob("*.py")
]


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods that a file defines."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds)
    }


def test_every_link_leads_to_a_function_of_that_name():
    links = LINK.findall((ROOT / "docs" / "method.md").read_text(encoding="utf-8"))
    assert len(links) >= 30
    missing = [
        (name, path)
        for name, path in links
        if name not in names_in((ROOT / "docs" / path).resolve())
    ]
    assert not missing


def test_every_equation_is_explained_and_computed_somewhere():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in CODE)
    for number in range(1, 11):
        assert re.search(rf"^## .*eq\. {number}\b", text, re.MULTILINE), number
        assert re.search(rf"eq\. {number}\b", code), number


def test_departures_are_numbered_without_gaps():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^- \*\*D(\d+)\.\*\*", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_afternoons_reading_is_as_long_as_the_readme_says():
    rows = re.findall(
        r"^\| \d \| (.*) \| (\d+) \| \d+ \|$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    for files, lines in rows:
        paths = re.findall(r"\(([\w/]+\.py)\)", files)
        assert sum(
            len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths
        ) == int(lines), files
    assert len(rows) == 5 and sum(int(lines) for _, lines in rows) <= 850
