"""Faults in the middle of a run, on engines of many kinds: what fault_scenes.py has seen.

Whatever happens, each block is back in the queue once, and the tokens are those of requests that
ran alone. Under policy `lru` the order of the free blocks is that of vLLM's queue, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from played import PlayScenes
from sliding_llama import write_sliding_llama

pytestmark = pytest.mark.engine

VARIANTS = {
    "vllm": None,
    "native": "native",
    "sorted": "native:sorted",
    "extent": "native:extent",
}
# And what their groups keep in blocks.
ATTENTION = ["FullAttentionSpec"]
ENGINES = {
    "prefix caching": ATTENTION,
    "no prefix caching": ATTENTION,
    "sliding windows": [*ATTENTION, *["SlidingWindowSpec"] * 3],
    "eager offload": ATTENTION,
    "lazy offload": ATTENTION,
    "asynchronous": ATTENTION,
    "n-gram": ATTENTION,
}
OFFLOADS = ["eager offload", "lazy offload"]
SCENES = ["calm", "storm", "aborts", "reset", "sleep"]
REQUESTS = 8
Play = dict[str, Any]


@pytest.fixture(scope="module")
def plays(
    model: Path,
    play_scenes: PlayScenes,
    tmp_path_factory: pytest.TempPathFactory,
    one_thread: dict[str, str],
) -> dict[str, dict[str, Play]]:
    """For each variant, what came out of each engine."""
    sliding = write_sliding_llama(tmp_path_factory.mktemp("sliding"))
    results = {}
    for variant, block_queue in VARIANTS.items():
        played = play_scenes(
            "fault_scenes.py",
            model,
            sliding,
            block_queue=block_queue,
            timeout=600,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            **one_thread,
        )
        results[variant] = played.result
    return results


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_runs(plays: dict[str, dict[str, Play]], variant: str) -> None:
    assert list(plays[variant]) == list(ENGINES)
    for engine, play in plays[variant].items():
        assert play["scheduling"] == (engine == "asynchronous")
        assert list(play["scenes"]) == SCENES
        assert play["groups"] == ENGINES[engine]
        for scene in play["scenes"].values():
            assert len(scene["pools"]) == (2 if engine in OFFLOADS else 1)
            for pool in scene["pools"]:
                assert pool["native"] == (variant != "vllm")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_faults_happen(plays: dict[str, dict[str, Play]], engine: str, variant: str) -> None:
    """Without them the other tests would say nothing."""
    play = plays[variant][engine]
    scenes = play["scenes"]
    assert scenes["calm"]["preemptions"] == 0
    assert scenes["storm"]["preemptions"] > 0
    for name in ("aborts", "reset", "sleep"):
        assert scenes[name]["running"] > 1
    half = ["FINISHED_ABORTED", "FINISHED_LENGTH_CAPPED"] * (REQUESTS // 2)
    assert scenes["aborts"]["statuses"] == half
    assert scenes["reset"]["done"] is True
    assert scenes["sleep"]["asleep"] == 0
    for name in ("reset", "sleep"):
        assert scenes[name]["preemptions"] >= scenes[name]["running"]
    hits = any(any(scene["cached"]) for scene in scenes.values())
    if engine == "no prefix caching":
        assert not hits
    elif variant != "extent":  # whose price is paid in hits, in so small a pool perhaps in all
        assert hits
    drafts = play["counters"].get("vllm:spec_decode_num_draft_tokens", 0)
    accepted = play["counters"].get("vllm:spec_decode_num_accepted_tokens", 0)
    assert (drafts > accepted > 0) == (engine == "n-gram")
    assert (play["stored"] > 0) == (play["loaded"] > 0) == (engine in OFFLOADS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scene", SCENES)
def test_the_tokens_are_those_of_requests_that_ran_alone(
    plays: dict[str, dict[str, Play]], scene: str, engine: str, variant: str
) -> None:
    alone = plays["vllm"][engine]["scenes"]["calm"]["tokens"]
    assert len({str(expected) for expected in alone}) == REQUESTS
    end = plays[variant][engine]["scenes"][scene]
    for got, expected, status in zip(end["tokens"], alone, end["statuses"], strict=True):
        assert got == (None if status == "FINISHED_ABORTED" else expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scene", SCENES)
def test_each_block_is_free_once(
    plays: dict[str, dict[str, Play]], scene: str, engine: str, variant: str
) -> None:
    for pool in plays[variant][engine]["scenes"][scene]["pools"]:
        assert pool["check"] == ""
        assert pool["in_use"] == 0
        assert pool["num_free_blocks"] == pool["num_blocks"] - 1
        assert sorted(pool["order"]) == list(range(1, pool["num_blocks"]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scene", SCENES)
def test_under_lru_all_is_as_with_vllms_queue(
    plays: dict[str, dict[str, Play]], scene: str, engine: str
) -> None:
    """The order of the free blocks, hits, preemptions."""
    native, expected = (plays[variant][engine]["scenes"][scene] for variant in ("native", "vllm"))
    assert native | {"pools": []} == expected | {"pools": []}
    # Of loads that end in one step vLLM tells as a set: the order of their blocks is by chance.
    if engine not in OFFLOADS:
        assert native["pools"][0]["order"] == expected["pools"][0]["order"]
