"""Arrows run one way: plugin -> the rest of the package -> the compiled modules."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pyblockpool"


def imports_of(path: Path) -> set[str]:
    """Full names of what a module imports anywhere, functions and type checking included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    return found


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "plugin")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_plugin_touches_vllm(path: Path) -> None:
    for name in imports_of(path):
        if path != PACKAGE / "replay.py":  # which replays with the classes of the installed vLLM
            assert name.split(".")[0] not in {"vllm", "torch"}, name
        if path != PACKAGE / "doctor.py":  # which has a process of its own look at vLLM
            assert not name.startswith("pyblockpool.plugin"), name


@pytest.mark.parametrize("name", ["__init__.py", "errors.py", "settings.py", "plugin/entry.py"])
def test_what_vllm_imports_of_us_at_start_is_light(name: str) -> None:
    """Top-level imports only: vLLM swallows what goes wrong in them."""
    allowed = {"pyblockpool.errors", "pyblockpool.settings"}
    for node in ast.parse((PACKAGE / name).read_text()).body:
        modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            assert module in allowed or module.split(".")[0] in sys.stdlib_module_names, module


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Neither the compiled modules nor NumPy, let alone vLLM, in a process of its own."""
    code = """
import sys
import pyblockpool, pyblockpool.plugin.entry
heavy = {"numpy", "torch", "vllm", "rich", "pyblockpool._queue", "pyblockpool._contiguity"}
print(sorted(heavy & set(sys.modules)))
import pyblockpool.contiguity
print(sorted(heavy & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == ["[]", "['numpy', 'pyblockpool._contiguity']"]


def test_the_reference_stands_on_its_own() -> None:
    assert not any("pyblockpool" in name for name in imports_of(PACKAGE / "reference.py"))


def test_the_headers_know_neither_python_nor_vllm() -> None:
    headers = sorted((PACKAGE.parent / "csrc").glob("*.hpp"))
    assert headers
    for header in headers:
        for line in header.read_text().splitlines():
            if line.startswith("#include"):
                name = line.split()[1]
                standard = name[0] == "<" and "." not in name  # C++ headers have no ending
                assert standard or (header.parent / name.strip('"')).exists(), line
