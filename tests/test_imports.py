"""What may import what: packages import only those before them, and nothing imports the program."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["tinystories", "tsmc", "twist", "distill", "eval", "main"]
METHOD = ORDER[1:4]
PLAIN = {"collections.abc", "copy", "dataclasses", "functools", "hashlib", "itertools", "math"}
PLAIN |= {"pathlib", "re", "signal", "typing", "torch", "torch.nn.functional", "numpy"}
POSIX = {"fcntl", "resource", "pwd", "grp", "termios"}
PORTABLE = {"run", "scorers", "viewer"}  # of the evaluation: what runs on any system
EXCEPT = {"tsmc/__main__.py"}  # starts the viewer


def imports(source: str) -> set[str]:
    """The modules that are imported anywhere in a file; a relative import keeps its dots."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


def forbidden(modules: set[str], package: str) -> set[str]:
    """Those of later packages; for the method also those that it does not need."""
    allowed = {*ORDER[: ORDER.index(package) + 1]}
    others = {module for module in modules if module.split(".")[0] not in allowed}
    return others - PLAIN if package in METHOD else others & {*ORDER, ""}


@pytest.mark.parametrize("package", ORDER[:5])
def test_packages_import_only_those_before_them(package):
    for path in (ROOT / package).rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in EXCEPT:
            continue
        modules = imports(path.read_text(encoding="utf-8"))
        assert not forbidden(modules, package), path
        is_portable = package != "eval" or path.parent.name in PORTABLE
        assert not (is_portable and {module.split(".")[0] for module in modules} & POSIX), path


def test_the_program_shows_the_algorithm_and_little_else():
    """What it imports of the evaluation: the directory of a run, its options and its results."""
    modules = imports((ROOT / "main.py").read_text(encoding="utf-8"))
    rooms = "command evaluate options processes run setup"
    allowed = {"eval", "eval.run", "eval.figures", "eval.table"}
    allowed |= {f"eval.run.{name}" for name in rooms.split()}
    found = {module for module in modules if module.split(".")[0] not in ORDER[:4]}
    assert found - PLAIN <= allowed
