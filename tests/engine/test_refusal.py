"""A value of VLLM_BLOCK_QUEUE that is not allowed stops the start, with our sentence."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pyblockpool.errors import SettingsError
from pyblockpool.settings import Settings

pytestmark = pytest.mark.engine

# No `if __name__ == "__main__"`: the refusal must come before any process is spawned.
OFFLINE = "import sys, vllm; vllm.LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True)"


@pytest.mark.parametrize(
    "start",
    [
        ["-c", OFFLINE],
        ["-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init", "--model"],
    ],
    ids=["LLM", "server"],
)
def test_a_wrong_value(
    model: Path, run_python: Callable[..., subprocess.CompletedProcess[str]], start: list[str]
) -> None:
    ended = run_python(*start, model, block_queue="nativ", timeout=120)
    assert ended.returncode != 0
    with pytest.raises(SettingsError) as refusal:
        Settings.from_environ({"VLLM_BLOCK_QUEUE": "nativ"})
    assert str(refusal.value) in ended.stdout
    assert "'python'" in str(refusal.value)
    assert "'native'" in str(refusal.value)


def test_a_missing_extension(
    model: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """vLLM swallows what a plugin raises while it is imported: ours has to raise when it runs."""
    broken = "import sys; sys.modules['pyblockpool._queue'] = None; " + OFFLINE
    ended = run_python("-c", broken, model, block_queue="native", timeout=120)
    assert ended.returncode != 0
    assert "NotCompiledError: the compiled module pyblockpool._queue does not load" in ended.stdout
