"""Where, when and of what a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone

import vllm
from cpuinfo import get_cpu_info

import pyblockpool


def provenance() -> dict[str, str]:
    def git(*arguments: str) -> str:
        ran = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    measured = (
        "csrc",
        "pyblockpool",
        "CMakeLists.txt",
        "pyproject.toml",
        "bench",
        ":!bench/results",
    )
    dirty = "+changes" if git("status", "--porcelain", "--", *measured) else ""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short", "HEAD") + dirty,
        "cpu": f"{get_cpu_info().get('brand_raw', platform.processor())}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "pyblockpool": pyblockpool.__version__,
    }
