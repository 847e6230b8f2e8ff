from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from played import Played, PlayScenes
from tiny_llama import engine_environment, write_tiny_llama

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def one_thread() -> dict[str, str]:
    """For the environment of an engine: a tiny model is as fast on one thread as on many.

    On a machine that is busy with something else it is far faster.
    """
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> RunPython:
    """``run_python(arguments…, block_queue=, record=)``: an engine never runs in pytest's process.

    An engine that hangs is ended with all its processes. stdout and stderr come back as one text.
    """

    def run(
        *arguments: str | Path,
        block_queue: str | None = None,
        record: Path | None = None,
        timeout: float = 240,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        record = record or tmp_path_factory.mktemp("record") / "record.jsonl"
        command = [sys.executable, *map(str, arguments)]
        log = record.with_suffix(".log")
        with (
            log.open("w") as log_file,
            subprocess.Popen(
                command,
                # Not here: `python -m` and `-c` would import pyblockpool from its source folder.
                cwd=record.parent,
                env=engine_environment(record, block_queue) | environment,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as child,
        ):
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                text = log.read_text(errors="replace")
                pytest.fail(f"no end after {timeout} s: {command}\n{text[-5000:]}")
        return subprocess.CompletedProcess(command, status, log.read_text(errors="replace"))

    return run


@pytest.fixture(scope="session")
def play_scenes(run_python: RunPython, tmp_path_factory: pytest.TempPathFactory) -> PlayScenes:
    """``play_scenes(script, arguments…, folder=)`` and the options of `run_python`: a script of
    this folder is run, and gets the file for its result as its last argument."""

    def play(
        script: str, *arguments: str | Path, folder: Path | None = None, **options: Any
    ) -> Played:
        folder = folder or tmp_path_factory.mktemp("scenes")
        result, record = folder / "result.json", folder / "record.jsonl"
        path = Path(__file__).with_name(script)
        ended = run_python(path, *arguments, result, record=record, **options)
        assert ended.returncode == 0, ended.stdout[-5000:]
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        return Played(
            result=json.loads(result.read_text(encoding="utf-8")),
            record=list(map(json.loads, lines)),
            log=ended.stdout,
        )

    return play
