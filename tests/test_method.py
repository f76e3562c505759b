"""docs/method.md and README.md: their links, equations and numbers are those of the code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[`(\w+)`\]\(([\w./]+\.py)\)")
ROW = re.compile(r"^\| \d \| .*\(([\w/]+\.py)\).* \| (\d+) \| \d+ \|$", re.MULTILINE)
METHOD = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


def names_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_link_leads_to_a_function_of_that_name():
    links = LINK.findall(METHOD)
    assert len(links) >= 30
    for name, path in links:
        assert name in names_in((ROOT / "docs" / path).resolve()), (name, path)


def test_every_equation_is_explained_and_computed_somewhere():
    folders = ("tinystories", "tsmc", "twist", "distill", "eval")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    for number in range(1, 11):
        assert re.search(rf"^## .*eq\. {number}\b", METHOD, re.MULTILINE), number
        assert re.search(rf"eq\. {number}\b", code), number


def test_the_files_to_read_first_are_about_as_long_as_the_readme_says():
    rows = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    for path, lines in rows:
        found = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert abs(found - int(lines)) <= 10, path
    assert len(rows) == 5 and sum(int(lines) for _, lines in rows) <= 1000
