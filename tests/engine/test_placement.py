"""The placement policies in real engines: the same tokens, and tables that stay together."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from played import PlayScenes

pytestmark = pytest.mark.engine

VALUES = {"vllm": None, "sorted": "native:sorted", "extent": "native:extent"}
TILE = 4  # blocks of 32 tokens
Play = dict[str, Any]


@pytest.fixture(scope="module")
def plays(model: Path, play_scenes: PlayScenes) -> dict[str, Play]:
    results = {}
    for name, value in VALUES.items():
        played = play_scenes(
            "placement_scenes.py", model, block_queue=value, VLLM_ENABLE_V1_MULTIPROCESSING="1"
        )
        tables = [line["table"][0] for line in played.record if line["kind"] == "request"]
        results[name] = played.result | {"tables": tables}
    return results


def tiles_too_many(table: list[int]) -> int:
    return len({block_id // TILE for block_id in table}) - -(-len(table) // TILE)


def blocks_a_run(tables: list[list[int]]) -> float:
    runs = sum(1 + sum(b != a + 1 for a, b in pairwise(table)) for table in tables)
    return sum(map(len, tables)) / runs


def test_what_runs(plays: dict[str, Play]) -> None:
    for name, play in plays.items():
        assert play["scheduling"]
        assert len(play["tables"]) == 60
        assert mean(map(len, play["tables"])) > 7
        if name != "vllm":
            assert play["stats"]["policy"] == name
            assert play["stats"]["free"] == 240
    assert plays["sorted"]["stats"]["size"] == 1
    assert plays["extent"]["stats"]["size"] == TILE, "128 tokens"


@pytest.mark.parametrize("name", ["sorted", "extent"])
def test_the_same_tokens(plays: dict[str, Play], name: str) -> None:
    assert plays[name]["tokens"] == plays["vllm"]["tokens"]


def test_tiles_of_a_request_are_its_own(plays: dict[str, Play]) -> None:
    """Tile amplification 1.0, but for one tile where a shared prefix branches off."""
    assert plays["extent"]["stats"]["shortages"] == 0
    extra = list(map(tiles_too_many, plays["extent"]["tables"]))
    assert max(extra) <= 1
    assert sum(extra) <= 4 * 6, "of those that share a prefix"
    assert max(map(tiles_too_many, plays["vllm"]["tables"])) > 3


def test_contiguity(plays: dict[str, Play]) -> None:
    runs = {name: blocks_a_run(play["tables"]) for name, play in plays.items()}
    assert runs["extent"] > 2 * runs["vllm"]
    assert runs["sorted"] > runs["vllm"]


@pytest.mark.parametrize("name", ["sorted", "extent"])
def test_after_a_reset_all_is_clean(plays: dict[str, Play], name: str) -> None:
    play = plays[name]
    assert play["stats"]["aged"] > 0
    assert play["reset"] is True
    assert play["after"]["aged"] == 0
    assert play["after"]["clean"] == (240 if name == "sorted" else 59)
