"""What may import what: the method knows no machine, no command line and no evaluation, and runs on any system."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
METHOD = ("tsmc", "twist", "distill")  # each may import those before it
PLAIN = {"math", "dataclasses", "collections.abc", "typing", "copy", "itertools", "re"}
MODEL = {f"tinystories.{name}" for name in ("gpt_neo", "cache", "decoder", "layers", "errors")}
POSIX = {"fcntl", "resource", "pwd", "grp", "termios"}
MACHINE = ("rank", "distributed", "onednn", "mkldnn")
PORTABLE = ("tinystories", *METHOD, "main.py", "eval/run", "eval/scorers", "eval/viewer")


def sources(*places: str) -> dict[str, str]:
    """The Python files of folders, or files, by their path from the root."""
    found = [[ROOT / place] if place.endswith(".py") else [*(ROOT / place).rglob("*.py")] for place in places]
    assert all(found)
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for paths in found for path in paths}


def imports(source: str) -> set[str]:
    """The modules that are imported anywhere in a file; a relative import keeps its dots."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


def of_packages(source: str, *packages: str) -> set[str]:
    """The modules of these packages that a file imports."""
    return {module for module in imports(source) if module.split(".")[0] in packages}


def beyond(source: str, package: str) -> set[str]:
    """The modules that a file of one package of the method imports and must not."""
    known = of_packages(source, "torch", "numpy", *METHOD[: METHOD.index(package) + 1])
    return imports(source) - known - PLAIN - MODEL


def machinery(source: str) -> set[str]:
    """Command-line options in a file's strings, and names in its code that speak of processes or of a library for products."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        texts = [value for value in vars(node).values() if isinstance(value, str)]
        if isinstance(node, ast.Constant):
            found |= {option for text in texts for option in re.findall(r"--[a-z][\w-]*", text)}
        else:
            found |= {text for text in texts if any(word in text.lower() for word in MACHINE)}
    return found


@pytest.mark.parametrize("package", METHOD)
def test_the_method_imports_tensors_networks_and_itself_in_order(package):
    for path, source in sources(package).items():
        assert beyond(source, package) == ({"runpy"} if path == "tsmc/__main__.py" else set()), path


def test_the_method_speaks_of_no_machine_and_no_command_line():
    for path, source in sources(*METHOD).items():
        rank_of_a_matrix = {"rank", "RANK"} if path == "distill/lora.py" else set()
        assert machinery(source) <= rank_of_a_matrix, path


def test_the_networks_know_nothing_of_what_uses_them():
    for path, source in sources("tinystories").items():
        assert not of_packages(source, *METHOD, "eval"), path


def test_nothing_imports_the_program():
    for path, source in sources("tinystories", *METHOD, "eval", "main.py", "docs").items():
        assert not of_packages(source, "main"), path


def test_what_everyone_runs_needs_no_posix():
    for path, source in sources(*PORTABLE).items():
        assert not of_packages(source, *POSIX), path


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import os", "tsmc"),
        ("def f():\n    from collections import OrderedDict", "tsmc"),
        ("from twist.mlp import TwistMLP", "tsmc"),
        ("import torch, distill.lora", "twist"),
        ("from tinystories.fast import accelerate", "distill"),
        ("from tinystories import GPTNeo", "distill"),
        ("from ..eval import metrics", "distill"),
    ],
)
def test_a_forbidden_import_is_seen(source, package):
    assert len(beyond(source, package)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(f'{x}: lower --ctl-learning-rate')",
        '"""A module.\n\n`main.py --rows 3`"""',
        "torch.backends.mkldnn.is_available()",
        "import torch.distributed as dist",
        "def f(x, rank=0): pass",
        "HAS_ONEDNN = True",
    ],
)
def test_a_word_of_the_machine_is_seen(source):
    assert len(machinery(source)) == 1 and not machinery("x = y--z  # --rows and oneDNN\nordinary = '-- no'")


def test_modules_of_packages_are_told_apart():
    assert of_packages("import main\nimport mainly, pwd.x\nfrom eval.main import y", "main", "pwd") == {"main", "pwd.x"}
