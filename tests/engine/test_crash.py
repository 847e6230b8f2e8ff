"""Engine cores that are killed, and the engines that take their place: what crash_scenes.py saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from played import PlayScenes

pytestmark = pytest.mark.engine

VARIANTS = {"vllm": None, "native": "native"}
CORES = {"two cores": 2, "one core": 1, "LLM": 1, "second LLM": 1}
ASYNC = ["two cores", "one core"]
KILLED = ["two cores", "one core", "LLM"]
BLOCKS = 47  # that can be free
Play = dict[str, Any]


@pytest.fixture(scope="module")
def plays(model: Path, play_scenes: PlayScenes, one_thread: dict[str, str]) -> dict[str, Play]:
    results = {}
    for variant, block_queue in VARIANTS.items():
        played = play_scenes(
            "crash_scenes.py",
            model,
            block_queue=block_queue,
            timeout=600,
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            **one_thread,
        )
        results[variant] = played.result | {"record": played.record}
    return results


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_runs(plays: dict[str, Play], variant: str) -> None:
    play = plays[variant]
    for engine, cores in CORES.items():
        assert play[engine]["cores"] == cores
        assert play[engine]["scheduling"] == (engine != "two cores")
    engines = [line for line in play["record"] if line["kind"] == "engine"]
    assert len({line["pid"] for line in engines}) == sum(CORES.values())
    for line in engines:
        native = line["queue"] == "pyblockpool._queue.FreeBlockQueue"
        assert native == (variant == "native")
        assert line["num_gpu_blocks"] == BLOCKS + 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", KILLED)
def test_a_core_is_killed(plays: dict[str, Play], engine: str, variant: str) -> None:
    """While requests run on it: all are told, and so is whoever asks, then and later."""
    killed = plays[variant][engine]["killed"]
    assert killed["unfinished"] > 0
    if engine in ASYNC:
        assert killed["running"].count("EngineDeadError") == killed["unfinished"]
    calls = 0 if variant == "vllm" else 1
    assert killed["unanswered"] == len(killed["waiting"]) == calls
    request, *later = killed["later"]
    assert request.startswith("EngineDeadError: ")
    assert len(later) == 2 * calls
    for answer in (*killed["waiting"], *later):
        assert answer.startswith("EngineDeadError: ")
        assert "its engine core has died: start a new one" in answer


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", CORES)
def test_the_next_engine_gives_the_same_tokens(
    plays: dict[str, Play], engine: str, variant: str
) -> None:
    expected = plays["vllm"]["two cores"]["round"]
    assert len({str(tokens) for tokens in expected}) == 5
    assert plays[variant][engine]["round"] == expected


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ASYNC)
def test_half_of_the_requests_are_aborted(
    plays: dict[str, Play], engine: str, variant: str
) -> None:
    """On each core; the others go on as if they were alone."""
    aborts = plays[variant][engine]["aborts"]
    cores = CORES[engine]
    assert aborts["reasons"] == (["abort"] * cores + ["length"] * cores) * 4
    alone = plays["vllm"]["two cores"]["alone"]
    assert aborts["tokens"] == [tokens for tokens in alone for _ in range(cores)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ["LLM", "second LLM"])
def test_sleep_aborts_what_runs(plays: dict[str, Play], engine: str, variant: str) -> None:
    assert plays[variant][engine]["asleep"]["reasons"] == ["abort"] * 4


def test_all_blocks_are_free_after_it(plays: dict[str, Play]) -> None:
    """One run of ascending ids: each block is queued, and queued once."""
    for engine, cores in CORES.items():
        after = plays["native"][engine]["after aborts" if engine in ASYNC else "after asleep"]
        stats = after["stats"]
        for each in stats if cores > 1 else [stats]:
            assert (each["free"], each["in_use"]) == (BLOCKS, 0)
            assert (each["runs"], each["longest_run"]) == (1, BLOCKS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resets_that_succeeded(plays: dict[str, Play], variant: str) -> None:
    record = plays[variant]["record"]
    resets = [line for line in record if line["kind"] == "reset" and line["success"]]
    assert len(resets) >= sum(CORES.values())
    for line in resets:
        assert (line["num_free_blocks"], line["check"]) == (BLOCKS, "")
