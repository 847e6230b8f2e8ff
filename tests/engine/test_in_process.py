"""The native queue against vLLM's, in an engine of one process, through all of scenarios.py.

Under policy `lru` everything is equal; under the others the tokens are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from played import PlayScenes

pytestmark = pytest.mark.engine

SCENES = [
    "chunked prefill",
    "one block differs",
    "prefix cache",
    "preemption",
    "aborts",
    "cache reset",
]


VARIANTS = {
    "vllm": None,
    "native": "native",
    "sorted": "native:sorted",
    "extent": "native:extent",
    "extent,size=64": "native:extent,size=64",  # larger than the pool
}
NATIVE = [variant for variant, value in VARIANTS.items() if value]


@pytest.fixture(scope="module")
def plays(model: Path, play_scenes: PlayScenes) -> dict[str, dict[str, Any]]:
    """What came out under each queue, and what the scheduler recorded meanwhile."""
    results = {}
    for variant, block_queue in VARIANTS.items():
        played = play_scenes(
            "scenarios.py", model, block_queue=block_queue, VLLM_ENABLE_V1_MULTIPROCESSING="0"
        )
        header, *record = played.record
        for line in record:
            if line["kind"] == "request":
                line["request_id"] = int(line["request_id"].partition("-")[0])  # "NUMBER-random"
        results[variant] = played.result | {"engine": header, "record": record}
    return results


def test_the_scenarios_are_what_they_say(plays: dict[str, dict[str, Any]]) -> None:
    stock = plays["vllm"]
    assert list(stock["scenes"]) == SCENES
    requests = {line["request_id"]: line for line in stock["record"] if "request_id" in line}
    one, other = stock["scenes"]["one block differs"]["ended"].values()
    assert one["tokens"] != other["tokens"]
    hits = [ended["cached"] for ended in stock["scenes"]["prefix cache"]["ended"].values()]
    assert sorted(hits) == [0, 0, 192, 320]
    preempted = [requests[int(at)] for at in stock["scenes"]["preemption"]["ended"]]
    assert any(line["num_preemptions"] for line in preempted)
    aborted = [line for line in requests.values() if line["status"] == "FINISHED_ABORTED"]
    # The one that still waited had no blocks yet.
    assert sorted(len(line["table"][0]) for line in aborted) == [0, 4, 16]
    reset = stock["scenes"]["cache reset"]
    assert reset["refused"]
    assert reset["done"]


def test_the_native_queue_runs(plays: dict[str, dict[str, Any]]) -> None:
    for variant in VARIANTS:
        assert plays[variant]["native"] == (variant in NATIVE)
    for name, play in plays.items():
        assert play["engine"]["pid"] == play["pid"], name


@pytest.mark.parametrize("scene", SCENES)
def test_tokens_and_order_of_free_blocks_are_equal(
    plays: dict[str, dict[str, Any]], scene: str
) -> None:
    assert plays["native"]["scenes"][scene] == plays["vllm"]["scenes"][scene]


def test_block_tables_are_equal(plays: dict[str, dict[str, Any]]) -> None:
    native, stock = plays["native"]["record"], plays["vllm"]["record"]
    assert len(native) == len(stock)
    for line, expected in zip(native, stock, strict=True):
        assert line == expected


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("scene", SCENES)
def test_tokens_are_equal_wherever_the_blocks_are(
    plays: dict[str, dict[str, Any]], scene: str, variant: str
) -> None:
    """A hit of the prefix cache may be shorter: `extent` evicts some blocks earlier."""
    ended, expected = (plays[name]["scenes"][scene]["ended"] for name in (variant, "vllm"))
    assert ended.keys() == expected.keys()
    for request, end in ended.items():
        assert end | {"cached": 0} == expected[request] | {"cached": 0}


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("scene", SCENES)
def test_nothing_is_lost(plays: dict[str, dict[str, Any]], scene: str, variant: str) -> None:
    end = plays[variant]["scenes"][scene]
    assert end["check"] == ""
    assert end["num_free_blocks"] == 47
    assert sorted(end["order"]) == list(range(1, 48))
