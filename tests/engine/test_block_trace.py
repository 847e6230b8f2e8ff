"""Block traces of real engines: complete, the same as the scheduler saw, and nobody notices."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from played import PlayScenes
from tiny_llama import BLOCK_SIZE

pytestmark = pytest.mark.engine

Line = dict[str, Any]
Play = dict[str, Any]
RunScript = Callable[..., Play]
# vLLM gives an engine core 5 s to end, which a busy machine may not: then the last line is missing.
KILLED = "force killing remaining process"
REASONS = {"FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}


@pytest.fixture(scope="module")
def run_script(
    model: Path, play_scenes: PlayScenes, tmp_path_factory: pytest.TempPathFactory
) -> RunScript:
    """What a script of this folder tells, what the scheduler wrote down, and the traces."""

    def run(
        script: str,
        *front_end: str,
        block_queue: str | None = None,
        trace: str | None = "trace.jsonl",
        processes: bool = True,
    ) -> Play:
        folder = tmp_path_factory.mktemp("trace")
        traced = {} if trace is None else {"VLLM_BLOCK_TRACE": str(folder / trace)}
        played = play_scenes(
            script,
            *front_end,
            model,
            folder=folder,
            block_queue=block_queue,
            VLLM_ENABLE_V1_MULTIPROCESSING=str(int(processes)),
            **traced,
        )
        names = sorted(folder.glob("trace*.jsonl"))
        return played.result | {
            "log": played.log,
            "record": played.record,
            "traces": [lines_of(name) for name in names],
            "names": [name.name for name in names],
        }

    return run


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def spelled(runs: list[list[int]]) -> list[int]:
    return [first + (n if first else 0) for first, count in runs for n in range(count)]


def requests_of(trace: list[Line]) -> list[Line]:
    return [line for line in trace if "request" in line]


def check_end(trace: list[Line], log: str) -> None:
    if "end" not in trace[-1]:
        assert KILLED in log
        return
    end = trace[-1]
    assert (end["end"], end["requests"], end["lost"]) == ("closed", len(requests_of(trace)), 0)


def check_against_the_scheduler(play: Play) -> None:
    """Each request that ended, with its table; each preemption; each reset; and the last line."""
    (trace,) = play["traces"]
    record = play["record"]
    ended = [line for line in requests_of(trace) if line["outcome"] != "preempted"]
    noted = [line for line in record if line["kind"] == "request"]
    assert len(ended) == len(noted) > 0
    for line, expected in zip(ended, noted, strict=True):
        (table,) = expected["table"]
        assert line["request"] == expected["request_id"]
        assert line["outcome"] == REASONS[expected["status"]]
        assert line["prompt"] == expected["num_prompt_tokens"]
        assert spelled(line["runs"]) == table
        assert line["blocks"] == len(table)
        assert (
            (line["blocks"] - 1) * BLOCK_SIZE
            < max(line["tokens"], 1)
            <= len(table) * BLOCK_SIZE + 1
        )
        if not expected["num_preemptions"]:  # else it may find its own answer again
            assert 0 <= line["hit"] < line["prompt"]
        if line["outcome"] == "length":
            assert line["prefill"] > 0
    preemptions = Counter(
        line["request"] for line in requests_of(trace) if line["outcome"] == "preempted"
    )
    assert preemptions == Counter(
        {line["request_id"]: line["num_preemptions"] for line in noted if line["num_preemptions"]}
    )
    resets = [line["done"] for line in trace if line.get("reset") == "prefix_cache"]
    assert resets == [line["success"] for line in record if line["kind"] == "reset"]
    times = [line["t"] for line in trace[1:]]
    assert times == sorted(times)
    check_end(trace, play["log"])


# In one process.


@pytest.fixture(scope="module")
def in_process(run_script: RunScript) -> dict[str, Play]:
    def run(**more: Any) -> Play:
        return run_script("scenarios.py", processes=False, **more)

    return {
        "untraced": run(trace=None),
        "vllm": run(),
        "native": run(block_queue="native"),
        "unwritable": run(trace="no folder/trace.jsonl"),
    }


@pytest.mark.parametrize("name", ["vllm", "native"])
def test_in_one_process(in_process: dict[str, Play], name: str) -> None:
    play = in_process[name]
    (trace,) = play["traces"]
    check_against_the_scheduler(play)
    outcomes = Counter(line["outcome"] for line in requests_of(trace))
    assert set(outcomes) == {"length", "abort", "preempted"}
    assert outcomes["abort"] == 3
    assert sorted({line["hit"] for line in requests_of(trace)})[-2:] == [192, 320]
    assert "VLLM_BLOCK_TRACE" not in play["log"], "vLLM warns of variables that it does not know"


@pytest.mark.parametrize("name", ["vllm", "native"])
def test_the_header(in_process: dict[str, Play], model: Path, name: str) -> None:
    play = in_process[name]
    header = play["traces"][0][0]
    assert header["pid"] == play["pid"]
    assert header["queue"] == (None if name == "vllm" else "native")
    assert (header["implementation"], header["policy"]) == (name, "lru")
    assert header["model"] == str(model)
    assert header["attention"] == "CPU_ATTN"
    assert header["dp_rank"] is None
    assert header["num_blocks"] == 48
    assert header["caching"] is True
    assert header["groups"] == [
        {"block_size": BLOCK_SIZE, "kind": "FullAttentionSpec", "layers": 2}
    ]


@pytest.mark.parametrize("name", ["vllm", "native", "unwritable"])
def test_nobody_notices(in_process: dict[str, Play], name: str) -> None:
    """The same tokens, hits and order of free blocks, whether it is recorded or cannot be."""
    assert in_process[name]["scenes"] == in_process["untraced"]["scenes"]


def test_an_untouched_vllm(in_process: dict[str, Play]) -> None:
    assert in_process["untraced"]["traces"] == []
    assert "pyblockpool" not in in_process["untraced"]["log"]


def test_a_file_that_cannot_be_written(in_process: dict[str, Play]) -> None:
    play = in_process["unwritable"]
    assert play["traces"] == []
    warned = re.findall(r"WARNING .*VLLM_BLOCK_TRACE.*", play["log"])
    assert len(warned) == 1
    assert "No such file or directory" in warned[0]


@pytest.mark.parametrize("name", ["vllm", "native"])
def test_prefill_is_what_vllm_measures(in_process: dict[str, Play], name: str) -> None:
    """Of requests that were not preempted: there vLLM counts the waiting in between, too."""
    play = in_process[name]
    lines = requests_of(play["traces"][0])
    preempted = {line["request"] for line in lines if line["outcome"] == "preempted"}
    ours = {
        line["request"].partition("-")[0]: line["prefill"]
        for line in lines
        if line["outcome"] == "length" and line["request"] not in preempted
    }
    assert len(ours) > 10
    theirs = {request: play["prefills"][request] for request in ours}
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=0.25)


# In an engine core of its own, which schedules asynchronously.


@pytest.fixture(scope="module")
def multi_process(run_script: RunScript) -> dict[str, Play]:
    return {
        "untraced": run_script("placement_scenes.py", trace=None),
        "vllm": run_script("placement_scenes.py"),
        "extent": run_script("placement_scenes.py", block_queue="native:extent"),
    }


@pytest.mark.parametrize("name", ["vllm", "extent"])
def test_in_a_process_of_its_own(multi_process: dict[str, Play], name: str) -> None:
    play = multi_process[name]
    assert play["scheduling"]
    (trace,) = play["traces"]
    check_against_the_scheduler(play)
    header = trace[0]
    assert [header["pid"]] == [line["pid"] for line in play["record"] if line["kind"] == "engine"]
    assert header["policy"] == ("extent" if name == "extent" else "lru")
    assert header["extent"] == (4 if name == "extent" else None)
    assert play["tokens"] == multi_process["untraced"]["tokens"]


def test_through_all_resets(run_script: RunScript) -> None:
    play = run_script("reset_scenes.py", "multi_process", block_queue="native")
    (trace,) = play["traces"]
    check_against_the_scheduler(play)
    order = [line["done"] for line in trace if line.get("reset") == "order"]
    # Before and after three rounds in order, twice when busy, at the end of that, and asleep.
    assert order == [True] * 4 + [False, True, True]
    for before, line in pairwise(trace):
        if line.get("reset") == "order" and before.get("reset") == "prefix_cache":
            assert before["done"], "the order only follows where the reset of the cache was done"


# Two data-parallel engines.


def test_a_file_for_each_process(run_script: RunScript) -> None:
    play = run_script(
        "reset_scenes.py", "data_parallel", block_queue="python", trace="trace.%p.jsonl"
    )
    traces = play["traces"]
    assert play["names"] == sorted(f"trace.{trace[0]['pid']}.jsonl" for trace in traces)
    assert {trace[0]["pid"] for trace in traces} == {
        line["pid"] for line in play["record"] if line["kind"] == "engine"
    }
    assert sorted(trace[0]["dp_rank"] for trace in traces) == [0, 1]
    told = sorted(line["request"] for trace in traces for line in requests_of(trace))
    noted = [line["request_id"] for line in play["record"] if line["kind"] == "request"]
    assert told == sorted(noted)
    for trace in traces:
        assert requests_of(trace)
        check_end(trace, play["log"])
    assert "WARNING" not in "".join(re.findall(r".*VLLM_BLOCK_TRACE.*", play["log"]))


def test_one_file_for_two_processes(run_script: RunScript) -> None:
    """One of them records; the other one warns, once, and serves."""
    play = run_script("reset_scenes.py", "data_parallel", block_queue="python")
    (trace,) = play["traces"]
    assert sum("block_trace" in line for line in trace) == 1
    check_end(trace, play["log"])
    warned = re.findall(r"WARNING .*VLLM_BLOCK_TRACE.*", play["log"])
    assert len(warned) == 1
    assert "%p" in warned[0]
    assert play["busy"]["tokens"] == play["busy"]["tokens alone"]
    noted = {line["request_id"] for line in play["record"] if line["kind"] == "request"}
    told = {line["request"] for line in requests_of(trace)}
    assert told < noted
