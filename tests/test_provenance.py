"""What a saved result says of itself, where things are missing, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import provenance as module
import pytest
from provenance import provenance

# What saved results have been read for so far.
KEYS = {"date", "commit", "cpu", "python", "vllm", "pyblockpool"}


def package(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "torch", "cpuinfo"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed


def test_without_any_package() -> None:
    told = provenance()
    assert KEYS | {"gpu", "torch"} == set(told)
    assert told["vllm"] is told["torch"] is told["gpu"] is None
    assert not str(told["cpu"]).startswith(",")  # the name of the processor


def test_with_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "a GPU")
    monkeypatch.setitem(sys.modules, "torch", package("torch", __version__="2.0+x", cuda=cuda))
    monkeypatch.setitem(sys.modules, "vllm", package("vllm", __version__="0.1"))
    cpuinfo = package("cpuinfo", get_cpu_info=lambda: {"brand_raw": "a CPU"})
    monkeypatch.setitem(sys.modules, "cpuinfo", cpuinfo)
    told = provenance()
    assert (told["torch"], told["gpu"], told["vllm"]) == ("2.0+x", "a GPU", "0.1")
    assert str(told["cpu"]).startswith("a CPU, ")
    cuda.is_available = lambda: False
    assert provenance()["gpu"] is None


def test_the_processor_as_linux_names_it(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    assert module._cpu_of_linux(file) == ""
    file.write_text("processor\t: 0\nmodel name\t: A CPU: fast\nmodel name\t: another\n")
    assert module._cpu_of_linux(file) == "A CPU: fast"
    file.write_text("processor\t: 0\nFeatures\t: fp\n")
    assert module._cpu_of_linux(file) == ""


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance()["commit"] is None  # no checkout
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "a.py").write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = provenance()["commit"]
    assert commit
    assert commit.isalnum()
    (tmp_path / "bench" / "results" / "new.json").write_text("1")
    assert provenance()["commit"] == commit  # results do not change what is measured
    (tmp_path / "bench" / "a.py").write_text("2")
    assert provenance()["commit"] == f"{commit}+changes"
    (tmp_path / "bench" / "a.py").write_text("1")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("1")
    assert provenance()["commit"] == commit
    assert provenance("tests")["commit"] == f"{commit}+changes"
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None  # no git
