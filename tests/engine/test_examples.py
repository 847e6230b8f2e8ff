"""The examples, as a user starts them, on the CPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_llama import BLOCK_SIZE

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = f"""
    --skip-tokenizer-init --enforce-eager --dtype float32 --max-model-len 1024
    --block-size {BLOCK_SIZE} --num-gpu-blocks-override 128 --kv-cache-memory-bytes 268435456
""".split()
RunPython = Callable[..., subprocess.CompletedProcess[str]]


def test_each_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix == ".py"} == {
        "rollout_loop.py",
        "async_server.py",
    }


def test_rollout_loop(model: Path, run_python: RunPython) -> None:
    ended = run_python(EXAMPLES / "rollout_loop.py", "--model", model, *CPU, block_queue="native")
    assert ended.returncode == 0, ended.stdout[-5000:]
    rounds = re.findall(
        r"^round (\d): 127 .* in (\d+) runs .* in (\d+); in order: True$",
        ended.stdout,
        re.MULTILINE,
    )
    assert [number for number, *_ in rounds] == ["1", "2", "3"]
    for _, before, after in rounds:
        assert int(before) > 1
        assert after == "1"


def test_async_server(model: Path, run_python: RunPython) -> None:
    size = ["--data-parallel-size", "2"]
    ended = run_python(
        EXAMPLES / "async_server.py", "--model", model, *CPU, *size, block_queue="python"
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    engines = re.findall(
        r"^round (\d), engine (\d): 127 .* in (\d+) runs .* in (\d+)$", ended.stdout, re.MULTILINE
    )
    assert [(number, rank) for number, rank, *_ in engines] == [
        (str(number), str(rank)) for number in (1, 2, 3) for rank in (0, 1)
    ]
    assert all(int(before) > 1 and after == "1" for *_, before, after in engines)
    assert ended.stdout.count("all engines in order: True") == 3


@pytest.mark.parametrize("example", ["rollout_loop.py", "async_server.py"])
def test_without_the_variable(model: Path, run_python: RunPython, example: str) -> None:
    ended = run_python(EXAMPLES / example, "--model", model, *CPU, timeout=120)
    assert ended.returncode != 0
    assert "Start this with VLLM_BLOCK_QUEUE=native" in ended.stdout
