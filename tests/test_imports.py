"""What imports what; links of method.md lead to the code."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["tinystories", "tsmc", "twist", "distill", "eval", "main"]
PLAIN = {"torch", "numpy", "tqdm", *sys.stdlib_module_names}
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ORDER[:5])
def test_packages_import_only_those_before_them(package):
    """The method, moreover, only PyTorch and numpy."""
    before, later = ORDER[: ORDER.index(package) + 1], ORDER[ORDER.index(package) + 1 :]
    for path in (ROOT / package).rglob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                modules.add(node.module.split(".")[0])
        assert modules.isdisjoint(later), path
        assert package in ("tinystories", "eval") or modules <= PLAIN | set(before), path


def test_every_link_leads_to_a_function_of_that_name():
    links = re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)\)", PAGE)
    assert len(links) >= 20
    for name, path in links:
        code = (ROOT / "docs" / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), (name, path)
