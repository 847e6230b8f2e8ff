"""The order reset on real engines: what reset_scenes.py has seen through each front end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from played import PlayScenes

pytestmark = pytest.mark.engine

# Front end, value of the variable, asynchronous scheduling.
PLAYS = {
    "in_process python": ("in_process", "python", False),
    "in_process native": ("in_process", "native", False),
    "multi_process native": ("multi_process", "native", True),
    "async native": ("async", "native", True),
    "data_parallel python": ("data_parallel", "python", False),
}
LLM_PLAYS = [name for name, (front_end, *_) in PLAYS.items() if "process" in front_end]
ASYNC_PLAYS = [name for name in PLAYS if name not in LLM_PLAYS]
Play = dict[str, Any]


@pytest.fixture(scope="module")
def run_scenes(model: Path, play_scenes: PlayScenes) -> Callable[[str, str | None], Play]:
    def run(front_end: str, block_queue: str | None) -> Play:
        played = play_scenes(
            "reset_scenes.py",
            front_end,
            model,
            block_queue=block_queue,
            VLLM_ENABLE_V1_MULTIPROCESSING="0" if front_end == "in_process" else "1",
        )
        return played.result | {"record": played.record, "log": played.log}

    return run


@pytest.fixture(scope="module")
def plays(run_scenes: Callable[[str, str | None], Play]) -> dict[str, Play]:
    return {name: run_scenes(*arguments[:2]) for name, arguments in PLAYS.items()}


def engines(stats: Any) -> list[dict[str, Any]]:
    return stats if isinstance(stats, list) else [stats]


@pytest.mark.parametrize("name", PLAYS)
def test_what_is_active(plays: dict[str, Play], name: str) -> None:
    """vllm-ascend#16596, UCM#743: told from inside the engine core, not by the front end."""
    front_end, block_queue, scheduling = PLAYS[name]
    play = plays[name]
    assert play["scheduling"] is scheduling
    stats = engines(play["fresh"])
    assert isinstance(play["fresh"], list) == (front_end == "data_parallel")
    assert len(stats) == (2 if front_end == "data_parallel" else 1)
    for each in stats:
        assert each["implementation"] == ("native" if block_queue == "native" else "vllm")
        assert (each["policy"], each["num_blocks"], each["free"]) == ("lru", 48, 47)
        assert (each["runs"], each["longest_run"], each["in_use"]) == (1, 47, 0)
        assert each["other_pools"] == []
        assert (each["pid"] == play["pid"]) == (front_end == "in_process")
    assert {line["pid"] for line in play["record"] if line["kind"] == "engine"} == {
        each["pid"] for each in stats
    }


@pytest.mark.parametrize("name", LLM_PLAYS)
def test_equal_rounds_have_equal_tables(plays: dict[str, Play], name: str) -> None:
    """pytorch#182593; without the reset of the order no two rounds are alike."""
    play = plays[name]
    tables: list[list[Any]] = [[]]
    for line in play["record"]:
        if line["kind"] == "request":
            tables[-1].append((line["request_id"], line["table"]))
        elif line["kind"] == "reset":
            tables.append([])
    as_ever, in_order = tables[:3], tables[4:7]  # between them, one reset of the order
    for round_of_tables in (*as_ever, *in_order):
        assert len(round_of_tables) == 5
        numbers = [int(request_id.partition("-")[0]) for request_id, _ in round_of_tables]
        first = min(numbers)
        round_of_tables[:] = [
            (number - first, table)
            for number, (_, table) in zip(numbers, round_of_tables, strict=True)
        ]
    assert as_ever[0] != as_ever[1] != as_ever[2] != as_ever[0]
    assert in_order[0] == in_order[1] == in_order[2] == as_ever[0]
    for rounds in (play["rounds as ever"], play["rounds in order"]):
        assert [done for _, done in rounds] == [True] * 3
        assert rounds[0] == rounds[1] == rounds[2]


def check_busy(busy: Play, engine: int) -> None:
    assert busy["order"] is False
    assert busy["cache and order"] is False
    before, after, end = (engines(busy[when]) for when in ("before", "after", "end"))
    assert before[engine]["in_use"] > 0
    assert before[engine]["runs"] > 1
    assert after[engine]["in_use"] >= before[engine]["in_use"]
    assert after[engine]["runs"] > 1
    assert busy["tokens"] == busy["tokens alone"]
    assert len(busy["tokens"]) == 600
    assert busy["done"] is True
    for each in end:
        assert (each["in_use"], each["free"], each["runs"], each["longest_run"]) == (0, 47, 1, 47)


@pytest.mark.parametrize("name", PLAYS)
def test_a_running_request(plays: dict[str, Play], name: str) -> None:
    """SkyRL#1824, NeMo-RL#3839; vllm-omni#6739: one of two engines is busy."""
    play = plays[name]
    check_busy(play["busy"], engine=-1)
    if PLAYS[name][0] == "data_parallel":
        assert engines(play["busy"]["before"])[0]["in_use"] == 0
    warned = re.findall(r"WARNING .*order of the free block queue .*blocks \((\d+)\)", play["log"])
    assert warned
    assert all(int(number) > 0 for number in warned)


@pytest.mark.parametrize("name", PLAYS)
def test_between_sleep_and_wake_up(plays: dict[str, Play], name: str) -> None:
    asleep = plays[name]["asleep"]
    assert asleep["done"] is True
    for each in engines(asleep["stats"]):
        assert (each["free"], each["unhashed"], each["runs"]) == (47, 47, 1)
    if "shuffled" in asleep:
        assert asleep["shuffled"]["runs"] > 1
    assert asleep["equal"]


def test_between_pause_and_resume(plays: dict[str, Play]) -> None:
    paused = plays["async native"]["paused"]
    assert paused["kept"] is False
    assert paused["equal"]
    assert paused["drained"] is True
    assert (paused["stats"]["unhashed"], paused["stats"]["runs"]) == (47, 1)


@pytest.mark.parametrize("name", ["in_process python", "in_process native"])
def test_a_second_thread(plays: dict[str, Play], name: str) -> None:
    """It learns that a step runs, or that blocks are in use, and disturbs nothing."""
    scene = plays[name]["second thread"]
    refusals = {
        answer: number
        for answer, number in scene["answers"].items()
        if re.match(
            r"RuntimeError: reset_free_block_queue_order\(\): .* in the middle of a", answer
        )
    }
    assert sum(refusals.values()) > 0
    assert set(scene["answers"]) - set(refusals) <= {"False", "True"}
    assert scene["equal"]
    assert scene["done"] is True
    assert (scene["stats"]["free"], scene["stats"]["runs"]) == (47, 1)
    assert plays[name]["check"] == ""


@pytest.mark.parametrize("name", ["in_process python", "in_process native"])
def test_the_figures_of_the_prefix_cache_stay(plays: dict[str, Play], name: str) -> None:
    before, done, after = plays[name]["figures of the cache"]
    assert done is True
    assert after == before
    assert before["reset"] is False


@pytest.mark.parametrize("name", ASYNC_PLAYS)
def test_another_event_loop(plays: dict[str, Play], name: str) -> None:
    scene = plays[name]["other loop"]
    assert scene["wrong"].startswith("RuntimeError: ")
    assert "asyncio.run_coroutine_threadsafe" in scene["wrong"]
    assert scene["right"] is True


@pytest.mark.parametrize("name", PLAYS)
def test_after_shutdown(plays: dict[str, Play], name: str) -> None:
    answers = plays[name]["after shutdown"]
    kind = "RuntimeError" if PLAYS[name][0] == "in_process" else "EngineDeadError"
    assert len(answers) == 3
    for answer in answers:
        assert answer.startswith(kind)
        assert "this engine has been shut down, or its engine core has died: start a" in answer


def test_an_engine_core_without_the_plugin(
    run_scenes: Callable[[str, str | None], Play],
) -> None:
    play = run_scenes("off", None)
    assert play["no plugin at all"] is False
    for answer in play["answers"]:
        assert answer.startswith("InactiveError: pyblockpool is not active in the engine core: set")
        assert "VLLM_BLOCK_QUEUE" in answer
    assert play["as ever"] == [True, 5]
