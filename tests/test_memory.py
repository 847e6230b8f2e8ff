"""Leaks: every call, with and without success, many times, under LeakSanitizer.

It looks for memory that nobody points to any more, before the end of the interpreter, which leaves
some of its own; in a process without vLLM, which leaves some, too. A part of `make sanitize`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    "PYBLOCKPOOL_SANITIZED" not in os.environ, reason="not a sanitizer run"
)

CHECK = """
import ctypes, gc, sys
sys.modules["vllm"] = None
import numpy as np
from test_allocation_failure import BLOCKS, CALLS, MISTAKES, PLACEMENTS, Scene
from pyblockpool import _contiguity

def play():
    table = np.arange(100, 0, -1, dtype=np.int32)
    for block_class in BLOCKS.values():
        for placement in PLACEMENTS.values():
            for call in CALLS.values():
                call(Scene(block_class, placement))()
            for call, error in MISTAKES.values():
                try:
                    call(Scene(block_class, placement))()
                except error:
                    pass
    _contiguity.table_figures(table, 8)
    try:
        _contiguity.table_figures(table - 50, 8)
    except ValueError:
        pass

def leak():
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    for _ in range(9):
        malloc(4321)

for _ in range(5):
    play()
    gc.collect()
LEAK
sys.exit(ctypes.CDLL(None).__lsan_do_recoverable_leak_check())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {
            "ASAN_OPTIONS": "detect_leaks=1:leak_check_at_exit=0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_call_leaks() -> None:
    ran = run(CHECK.replace("LEAK", ""))
    assert ran.returncode == 0, ran.stderr


def test_a_leak_is_found() -> None:
    ran = run(CHECK.replace("LEAK", "leak()"))
    assert ran.returncode == 1
    assert "detected memory leaks" in ran.stderr
