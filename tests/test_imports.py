"""What may import what: packages import only those before them, and nothing imports the program."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["tinystories", "tsmc", "twist", "distill", "eval", "main"]
METHOD = ORDER[1:4]
PLAIN = {"collections.abc", "copy", "dataclasses", "itertools", "math", "pathlib", "re", "signal"}
PLAIN |= {"typing", "torch", "torch.nn.functional", "numpy"}
POSIX = {"fcntl", "resource", "pwd", "grp", "termios"}
PORTABLE = [*ORDER[:4], "main.py", "eval/run", "eval/scorers", "eval/viewer"]


def imports(source: str) -> set[str]:
    """The modules that are imported anywhere in a file; a relative import keeps its dots."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


def files(*places: str) -> list[Path]:
    """The Python files of folders, or files."""
    found = [path for place in places for path in (ROOT / place).rglob("*.py")]
    return found + [ROOT / place for place in places if place.endswith(".py")]


def package_of(module: str) -> str:
    return module.split(".")[0]


def forbidden(source: str, package: str) -> set[str]:
    """Imports of later packages; in the method also of what it does not need."""
    later = set(ORDER[ORDER.index(package) + 1 :])
    found = {module for module in imports(source) if package_of(module) in {*later, ""}}
    if package in METHOD:
        found |= {m for m in imports(source) if package_of(m) not in ORDER and m not in PLAIN}
    return found


@pytest.mark.parametrize("package", ORDER[:5])
def test_packages_import_only_those_before_them(package):
    paths = files(package)
    assert paths
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if path.relative_to(ROOT).as_posix() in ("tsmc/__main__.py", "eval/paper/parts.py"):
            continue  # another name of a command; a study runs the program
        assert not forbidden(source, package), path


def test_the_program_shows_the_algorithm_and_little_else():
    """What it imports of the evaluation: the directory of a run, its options and its results."""
    modules = imports((ROOT / "main.py").read_text(encoding="utf-8"))
    names = {m for m in modules if package_of(m) not in ORDER[:4] and m not in PLAIN}
    assert names <= {"eval.run"} | {
        f"eval.run.{name}"
        for name in ("command", "evaluate", "figures", "options", "run", "setup", "table")
    }


def test_what_everyone_runs_needs_no_posix():
    for path in files(*PORTABLE):
        modules = imports(path.read_text(encoding="utf-8"))
        assert not {package_of(module) for module in modules} & POSIX, path


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import os", "tsmc"),
        ("def f():\n    from collections import OrderedDict", "tsmc"),
        ("from twist.mlp import TwistMLP", "tsmc"),
        ("import torch, distill.lora", "twist"),
        ("from tsmc import tsmc", "tinystories"),
        ("from main import main", "eval"),
        ("from ..eval import metrics", "distill"),
    ],
)
def test_a_forbidden_import_is_seen(source, package):
    assert len(forbidden(source, package)) == 1
