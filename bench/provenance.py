"""Where, when and of what a result was measured."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pyblockpool

ROOT = Path(__file__).parent.parent
# What decides what is measured: not the results, and what is told of them.
MEASURED = (
    *("csrc", "pyblockpool", "CMakeLists.txt", "pyproject.toml", "bench"),
    *(":!bench/results", ":!bench/RESULTS.md"),
)


def provenance(*more: str) -> dict[str, str | None]:
    """What a saved result says of itself.

    Args:
        more: further paths, from the root of the sources, that decide what is measured.

    None stands for what is not there: vllm or torch, a GPU that torch can use, a commit where the
    sources are no git checkout. vLLM changes settings of PyTorch when it is imported, as it is
    here: where that matters, and vLLM is not what is measured, call this last.
    """
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(*MEASURED, *more),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
        "gpu": _gpu(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm"),
        "pyblockpool": pyblockpool.__version__,
    }


def _commit(*measured: str) -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return ran.stdout.strip()

    try:
        dirty = "+changes" if git("status", "--porcelain", "--", *measured) else ""
        return git("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    try:
        from cpuinfo import get_cpu_info
    except ImportError:
        return _cpu_of_linux() or platform.processor() or platform.machine()
    return str(get_cpu_info().get("brand_raw", platform.processor()))


def _cpu_of_linux(path: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the first processor, "" where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None
