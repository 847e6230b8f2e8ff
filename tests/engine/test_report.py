"""Real engines with VLLM_BLOCK_TRACE: what the report shows of them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# The name of a trace -> VLLM_BLOCK_QUEUE, what is reset after each round.
ENGINES = {
    "vllm": (None, "cache"),
    "reset": ("native", "order"),
    "sorted": ("native:sorted", "cache"),
    "extent": ("native:extent", "cache"),
}
ROUNDS, REQUESTS = 6, 8


@pytest.fixture(scope="module")
def traces(
    model: Path,
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with a trace of each engine, and the tokens that it gave."""
    folder = tmp_path_factory.mktemp("traces")
    for name, (block_queue, reset) in ENGINES.items():
        ended = run_python(
            Path(__file__).with_name("report_scenes.py"),
            model,
            folder / f"{name}.json",
            reset,
            block_queue=block_queue,
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            VLLM_BLOCK_TRACE=str(folder / f"{name}.jsonl"),
        )
        assert ended.returncode == 0, ended.stdout[-5000:]
        (folder / f"{name}.log").write_text(ended.stdout, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def report(
    traces: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> dict[str, Any]:
    files = [traces / f"{name}.jsonl" for name in ENGINES]
    ran = run_python("-m", "pyblockpool", "report", *files, "--json")
    assert ran.returncode == 0, ran.stdout
    found = json.loads(ran.stdout.splitlines()[-1])
    return {engine["label"]: engine for engine in found["engines"]}


def of_rounds(engine: dict[str, Any], part: str, figure: str) -> list[float]:
    return [each["groups"][0][part][figure] for each in engine["rounds"]]


def test_what_ran(report: dict[str, Any], traces: Path) -> None:
    assert list(report) == list(ENGINES)
    tokens = {name: json.loads((traces / f"{name}.json").read_text()) for name in ENGINES}
    for name, engine in report.items():
        assert tokens[name] == tokens["vllm"]
        header = engine["header"]
        assert header["queue"] == ENGINES[name][0]
        assert header["implementation"] == ("vllm" if name == "vllm" else "native")
        assert header["num_blocks"] == 241
        assert [group["block_size"] for group in header["groups"]] == [32]
        if engine["end"]:
            assert engine["end"]["end"] == "closed"
            assert (engine["end"]["requests"], engine["end"]["lost"]) == (ROUNDS * REQUESTS, 0)
        else:  # vLLM gives an engine core 5 s to end, which a busy machine may not
            log = (traces / f"{name}.log").read_text(encoding="utf-8")
            assert "force killing remaining process" in log
        assert engine["split"] == "6 rounds between resets"
        assert [each["finished"] for each in engine["rounds"]] == ROUNDS * [REQUESTS]
        assert all(each["prefill_ms"] > 0 for each in engine["rounds"])


def test_the_shuffle_grows_round_by_round(report: dict[str, Any]) -> None:
    """Under vLLM's queue; whoever puts the order back, or places blocks, stays where it was."""
    shares, tiles = (
        {name: of_rounds(engine, "prompts", figure) for name, engine in report.items()}
        for figure in ("mergeable_share", "tile_amplification")
    )
    assert shares["vllm"][0] == 1.0
    assert max(shares["vllm"][-2:]) < 0.1
    for name in ("reset", "sorted", "extent"):
        assert min(shares[name]) > 0.95, name
    for number in (-2, -1):
        assert tiles["vllm"][number] > 1.3 * tiles["reset"][number]
    assert tiles["extent"] == ROUNDS * [1.0]
    whole = of_rounds(report["extent"], "tables", "tile_amplification")
    assert whole == ROUNDS * [1.0]


def test_a_picture_of_it(
    traces: Path,
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    files = [traces / f"{name}.jsonl" for name in ENGINES]
    ran = run_python("-m", "pyblockpool", "report", *files, "--plot", tmp_path / "rounds.svg")
    assert ran.returncode == 0, ran.stdout
    picture = (tmp_path / "rounds.svg").read_text(encoding="utf-8")
    assert picture.lstrip().startswith("<?xml")
    for name in ENGINES:
        assert name in ran.stdout
