"""What imports what; links, equations and numbers of method.md and README.md are the code's."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["tinystories", "tsmc", "twist", "distill", "eval", "main"]
METHOD = ORDER[1:4]
PLAIN = {"abc", "collections.abc", "copy", "dataclasses", "functools", "hashlib", "itertools"}
PLAIN |= {"math", "numpy", "pathlib", "re", "typing", "torch", "torch.nn.functional"}
POSIX = {"fcntl", "resource", "pwd", "grp", "termios"}
PORTABLE = {"scorers"}  # of the evaluation: what runs on any system
EXCEPT = {"tsmc/__main__.py", "tsmc/processes.py"}  # a command; torch.distributed


def imports(source: str) -> set[str]:
    """The modules that are imported anywhere in a file; a relative import keeps its dots."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


@pytest.mark.parametrize("package", ORDER[:5])
def test_packages_import_only_those_before_them(package):
    """The method also nothing that it does not need."""
    before, later = ORDER[: ORDER.index(package) + 1], ORDER[ORDER.index(package) + 1 :]
    for path in (ROOT / package).rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in EXCEPT:
            continue
        modules = imports(path.read_text(encoding="utf-8"))
        roots = {module.split(".")[0] for module in modules}
        others = {module for module in modules if module.split(".")[0] not in before}
        assert roots.isdisjoint([*later, ""]), path
        assert package not in METHOD or others <= PLAIN, path
        is_portable = package != "eval" or path.parent.name in PORTABLE
        assert not (is_portable and roots & POSIX), path


def test_the_program_shows_the_algorithm_and_little_else():
    """What it imports of the evaluation: the directory of a run, its options and its results."""
    modules = imports((ROOT / "main.py").read_text(encoding="utf-8"))
    rooms = "command config evaluate figures run table world"
    allowed = {f"eval.{name}" for name in rooms.split()}
    found = {module for module in modules if module.split(".")[0] not in ORDER[:4]}
    assert found - PLAIN <= allowed


LINK = re.compile(r"\[`(\w+)`\]\(([\w./]+\.py)\)")
ROW = re.compile(r"^\| \d \| .*\(([\w/]+\.py)\).* \| (\d+) \| \d+ \|$", re.MULTILINE)
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


def test_every_link_leads_to_a_function_of_that_name():
    links = LINK.findall(PAGE)
    assert len(links) >= 30
    for name, path in links:
        code = (ROOT / "docs" / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), (name, path)


def test_every_equation_is_explained_and_computed_somewhere():
    folders = ("tinystories", "tsmc", "twist", "distill", "eval")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    for number in range(1, 11):
        assert re.search(rf"^## .*eq\. {number}\b", PAGE, re.MULTILINE), number
        assert re.search(rf"eq\. {number}\b", code), number


def test_the_files_to_read_first_are_about_as_long_as_the_readme_says():
    rows = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    for path, lines in rows:
        found = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert abs(found - int(lines)) <= 10, path
    assert len(rows) == 5 and sum(int(lines) for _, lines in rows) <= 1000
