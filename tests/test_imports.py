"""What imports what; links and equations of method.md are the code's."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["tinystories", "tsmc", "twist", "distill", "eval", "main"]
PLAIN = {"abc", "collections.abc", "copy", "dataclasses", "functools", "hashlib", "itertools"}
PLAIN |= {"math", "numpy", "pathlib", "re", "typing"}
PLAIN |= {"torch", "torch.nn.functional", "torch.nn.utils"}
EXCEPT = {"tsmc/processes.py"}  # torch.distributed
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


def imports(source: str) -> set[str]:
    """The modules that are imported anywhere in a file."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "no relative imports"
            modules.add(node.module)
    return modules


@pytest.mark.parametrize("package", ORDER[:5])
def test_packages_import_only_those_before_them(package):
    """The method also nothing that it does not need."""
    before, later = ORDER[: ORDER.index(package) + 1], ORDER[ORDER.index(package) + 1 :]
    for path in (ROOT / package).rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in EXCEPT:
            continue
        modules = imports(path.read_text(encoding="utf-8"))
        others = {module for module in modules if module.split(".")[0] not in before}
        assert {module.split(".")[0] for module in others}.isdisjoint(later), path
        assert package not in ("tsmc", "twist", "distill") or others <= PLAIN, path


def test_every_link_leads_to_a_function_of_that_name():
    links = re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)\)", PAGE)
    assert len(links) >= 30
    for name, path in links:
        code = (ROOT / "docs" / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), (name, path)


def test_every_equation_is_explained_and_computed_somewhere():
    paths = [path for package in ORDER[:5] for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    for number in range(1, 11):
        assert re.search(rf"^## .*eq\. {number}\b", PAGE, re.MULTILINE), number
        assert re.search(rf"eq\. {number}\b", code), number
