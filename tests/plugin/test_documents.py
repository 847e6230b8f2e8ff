"""README and docs: commands and examples that need the installed vLLM; see documents.py."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from documents import (
    DOCUMENTS,
    ROOT,
    Block,
    Command,
    all_blocks,
    all_commands,
    calls_an_engine,
    examples,
    needs_vllm,
    run_examples,
)
from implementations import HAS_VLLM

from pyblockpool.plugin import entry
from pyblockpool.plugin.surface import vllm_version
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE


def documented_version() -> str:
    """That of the Makefile, for which the documents are written."""
    found = re.search(r"^VLLM \?= .*==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return found[1]


pytestmark = pytest.mark.skipif(
    not HAS_VLLM or vllm_version() != documented_version(),
    reason=f"the documents are written for vLLM {documented_version()}",
)


EXAMPLES = [path for path in DOCUMENTS if examples(path) and needs_vllm(path)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_examples(path: Path) -> None:
    run_examples(path)


@pytest.mark.parametrize(
    "command", [each for each in all_commands("pyblockpool") if "report" not in each.words], ids=str
)
def test_pyblockpool(command: Command, tmp_path: Path) -> None:
    """It runs as it stands."""
    for word in command.words[2:]:
        if word.endswith(".jsonl"):
            row = {"input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}
            rows = [row | {"timestamp": at} for at in range(5)]
            (tmp_path / word).write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = subprocess.run(
        [sys.executable, "-m", "pyblockpool", *command.words[1:]],
        cwd=tmp_path,
        env=os.environ | dict(command.variables),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = {"doctor": "The attention backends of this vLLM", "replay": "tile amplification"}
    assert said[command.words[1]] in ran.stdout


@pytest.mark.parametrize("kind", ["export", "python", "vllm"])
def test_variables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM knows them, or our plugin makes them known."""
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    monkeypatch.setenv(TRACE_VARIABLE, "trace.jsonl")
    entry.register()
    from vllm import envs

    found = {name for command in all_commands(kind) for name, _ in command.variables}
    assert found <= set(envs.environment_variables)


@pytest.mark.parametrize("command", all_commands("vllm"), ids=str)
def test_vllm(command: Command) -> None:
    """No options of vLLM's, which nobody would check."""
    assert re.fullmatch("vllm serve [^ -][^ ]*", " ".join(command.words))


@pytest.mark.parametrize("command", all_commands("curl"), ids=str)
def test_curl(command: Command) -> None:
    """The routes that it calls are ours or vLLM's."""
    from vllm.entrypoints.serve.dev.cache.api_router import router as of_vllm

    from pyblockpool.plugin.endpoint import router as ours

    *options, url = command.words[1:]
    assert options in ([], ["-X", "POST"])
    method = options[1] if options else "GET"
    address = urlsplit(f"http://{url}")
    assert address.netloc == "localhost:8000"
    routes: list[Any] = [*ours.routes, *of_vllm.routes]
    assert (address.path, method) in {
        (route.path, each) for route in routes for each in route.methods
    }


@pytest.mark.parametrize("command", all_commands("python"), ids=str)
def test_python(command: Command) -> None:
    """The examples, with options that vLLM has; tests/engine runs them, and my_loop.py."""
    from vllm import EngineArgs

    script, *options = command.words[1:]
    if script == "my_loop.py":
        assert options == []
        return
    assert (ROOT / script).parent == ROOT / "examples"
    assert (ROOT / script).exists()
    known = inspect.signature(EngineArgs).parameters
    for option in options:
        if option.startswith("--"):
            assert option[2:].replace("-", "_") in known, option


Calls = Iterator[tuple[str, ast.Call, bool]]


def calls(block: Block) -> Calls:
    """Calls of methods of ``llm`` and ``engine`` and of ``LLM``: which, and whether awaited."""
    tree = ast.parse(block.text)
    awaited = [node.value for node in ast.walk(tree) if isinstance(node, ast.Await)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if re.fullmatch(r"LLM|(llm|engine)\.\w+", name):
                yield name, node, node in awaited


FRAGMENTS = [block for block in all_blocks("python") if calls_an_engine(block)]


@pytest.mark.parametrize("block", FRAGMENTS, ids=str)
def test_calls_of_an_engine(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's classes, with the plugin switched on, take them."""
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    entry.register()
    from vllm import LLM, EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    found = list(calls(block))
    assert found
    for name, call, awaited in found:
        what, _, method = name.partition(".")
        called: Any = EngineArgs
        positional = [None] * len(call.args)
        if method:
            # Somewhere `engine` is an LLM or an AsyncLLM: there the call is awaited.
            called = getattr(AsyncLLM if what == "engine" else LLM, method)
            assert inspect.iscoroutinefunction(called) == awaited, name
            positional.append(None)  # self
        keywords = {str(each.arg): None for each in call.keywords}
        inspect.signature(called).bind(*positional, **keywords)
