"""Figures of block traces: by hand, and against plain definitions."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from block_traces import FULL, WINDOW, end, header, request, reset, write
from hypothesis import given
from hypothesis import strategies as st

from pyblockpool.block_trace import read_sections
from pyblockpool.report import (
    MANY_REQUESTS,
    STRETCHES,
    Choices,
    EngineFigures,
    Figures,
    engine_figures,
    labels,
)


def report(path: Path, **choices: Any) -> EngineFigures:
    (section,) = read_sections(path)
    return engine_figures(section, "engine", Choices(**choices))


def test_by_hand(tmp_path: Path) -> None:
    """Two rounds in a pool of 100 blocks of 16 tokens; a tile is 8 of them."""
    path = write(
        tmp_path / "trace",
        header(),
        # Its prompt fills 3 of the 5 blocks. Runs: 6 7 8 | 20 21. Tiles: 6-7, 8, 20-21.
        request([6, 7, 8, 20, 21], 40, hit=16, prefill=0.1, outcome="stop"),
        # Runs: 6 | 5 4 as single ones.
        request([6, 5, 4], 48, hit=0, prefill=0.3),
        reset(),
        request([1], 5, outcome="preempted", hit=5, prefill=None, request="cmpl-2"),
        request([9, 10], 20, outcome="abort", prefill=None),
    )
    engine = report(path)
    first, second = engine.rounds
    assert (first.finished, first.aborted, first.preempted, first.requests) == (2, 0, 0, 2)
    assert (first.prompt_tokens, first.hit_tokens, first.hit_rate) == (88, 16, 16 / 88)
    assert first.prefill_ms == pytest.approx(200)
    assert first.median_prefill_ms == pytest.approx(200)
    prompts, tables = first.groups[0].prompts, first.groups[0].tables
    assert (prompts.contiguity.tables, prompts.contiguity.blocks) == (2, 6)
    assert prompts.contiguity.blocks_per_run == 6 / 4
    assert prompts.median_blocks_per_run == (3 + 1) / 2
    assert prompts.contiguity.mergeable_share == 2 / 4
    assert prompts.contiguity.mergeable_share_either == 4 / 4
    assert prompts.contiguity.tile_amplification == (2 + 1) / (1 + 1)
    assert tables.contiguity.blocks_per_run == 8 / 5
    assert tables.median_blocks_per_run == (5 / 2 + 1) / 2
    assert tables.contiguity.longest_run == 3
    assert tables.contiguity.mergeable_share == 3 / 6
    assert tables.contiguity.tile_amplification == (3 + 1) / (1 + 1)
    assert tables.contiguity.descriptors(101) == 505
    # 4 5 6 7 8 20 21 were used.
    assert (first.used_blocks, first.highest_block, first.high_water_ratio) == (7, 21, 3.0)
    # The preempted one counts as a table, and not as a request.
    assert (second.finished, second.aborted, second.preempted, second.requests) == (0, 1, 1, 1)
    assert (second.prompt_tokens, second.hit_tokens) == (20, 0)
    assert math.isnan(second.prefill_ms)
    assert math.isnan(second.median_prefill_ms)
    assert second.groups[0].tables.contiguity.tables == 2
    assert engine.all.requests == 3
    assert engine.all.groups[0].tables.contiguity.blocks == 11
    assert engine.all.used_blocks == 10
    # Who held a block last, by its place in the round.
    assert [engine.first_holders[block] for block in (3, 4, 6, 7, 21)] == [-1, 1, 1, 0, 0]
    assert [engine.last_holders[block] for block in (1, 9, 4)] == [0, 1, -1]


def test_case_4_of_the_public_reports(tmp_path: Path) -> None:
    """vllm-project/vllm#55434: 642 blocks of a fresh pool are one run, 101 descriptors."""
    trace = write(tmp_path / "trace", header(num_blocks=2000), request(range(1, 643), 642 * 16))
    figures = report(trace).all.as_json(101)["groups"][0]["tables"]
    assert (figures["runs"], figures["descriptors"], figures["longest_run"]) == (1, 101, 642)


def test_a_sliding_window(tmp_path: Path) -> None:
    """Null blocks are left out, and each group has figures of its own."""
    table = [3, 4, 5, 6]
    rows = [request(table, 64), request([0, 0, 9, 8], 64, group=1)]
    engine = report(write(tmp_path / "trace", header(groups=[FULL, WINDOW]), *rows))
    full, window = engine.all.groups
    assert engine.all.requests == 1
    assert (full.group.kind, window.group.kind) == ("FullAttentionSpec", "SlidingWindowSpec")
    assert (full.tables.contiguity.blocks, full.tables.contiguity.runs) == (4, 1)
    assert (window.tables.contiguity.blocks, window.tables.contiguity.runs) == (2, 2)
    assert window.prompts.contiguity.blocks == 2
    assert window.tables.contiguity.mergeable_share == 0
    assert (engine.all.used_blocks, engine.all.highest_block) == (6, 9)
    assert engine.all.prompt_tokens == 64


def test_what_a_preempted_request_finds_again(tmp_path: Path) -> None:
    """Blocks of its own, more than its prompt even, and at once: it counts as it began."""
    rows = [
        request([1, 2], 20, outcome="preempted", hit=16, prefill=0.5),
        reset(),
        request([1, 2], 20, outcome="preempted", hit=32, prefill=None),
        request([5, 6], 20, outcome="preempted", hit=0, prefill=None, request="cmpl-2"),
        request([1, 2, 3], 20, hit=48, prefill=0.001),
        request([5, 6], 20, hit=16, prefill=0.7, request="cmpl-2"),
        request([1, 2, 3], 20, hit=0, prefill=0.9),  # a new one under an id that was used
    ]
    engine = report(write(tmp_path / "trace", header(), *rows))
    assert engine.rounds[0].hit_tokens == len(engine.rounds[0].prefill) == 0
    assert (engine.all.prompt_tokens, engine.all.hit_tokens) == (60, 16)
    assert sorted(engine.all.prefill) == [0.5, 0.7, 0.9]
    assert sorted(engine.rounds[1].prefill) == [0.5, 0.7, 0.9]


def test_requests_without_a_table_in_the_first_group(tmp_path: Path) -> None:
    """That of a tier in host memory, whose blocks have ids of their own (vLLM's HiSparse)."""
    rows = [
        request([3 + number], 20, group=group, t=1.0 * number, outcome=outcome)
        for number, outcome in enumerate(["preempted", "length", "abort"])
        for group in (1, 2)
    ]
    path = write(tmp_path / "trace", header(groups=[FULL, FULL, WINDOW]), *rows)
    (section,) = read_sections(path)
    assert (section.requests, section.preemptions) == (2, 1)
    engine = report(path, rounds=2)
    assert (engine.all.finished, engine.all.aborted, engine.all.preempted) == (1, 1, 1)
    assert engine.all.prompt_tokens == 40
    assert [each.requests for each in engine.rounds] == [1, 1]
    assert [engine.last_holders[block] for block in (4, 5)] == [-1, 0]
    assert [each.tables.contiguity.tables for each in engine.all.groups] == [0, 3, 3]


@pytest.mark.parametrize(
    ("block_size", "tile_tokens", "tile"), [(16, 128, 8), (48, 128, 2), (256, 128, 1), (16, 64, 4)]
)
def test_tiles_are_told_in_tokens(
    tmp_path: Path, block_size: int, tile_tokens: int, tile: int
) -> None:
    trace = write(tmp_path / "trace", header(groups=[FULL | {"block_size": block_size}]))
    (group,) = report(trace, tile_tokens=tile_tokens).all.groups
    assert (group.tables.contiguity.tile, group.prompts.contiguity.tile) == (tile, tile)


def test_a_trace_in_which_nothing_has_ended(tmp_path: Path) -> None:
    engine = report(write(tmp_path / "trace", header(), reset()))
    assert engine.rounds == []
    figures = engine.as_json(1)
    assert figures["all"]["hit_rate"] is None
    assert figures["all"]["high_water_ratio"] is None
    assert figures["all"]["groups"][0]["tables"]["blocks_per_run"] is None
    json.dumps(figures, allow_nan=False)


class TestRounds:
    def trace(self, tmp_path: Path, *marks: str) -> Path:
        """``R``: a reset that was done, ``F``: one that was refused, ``p``: a preempted request,
        any other letter: a request."""
        rows = {"R": reset(), "F": reset(done=False), "p": request([1], 9, outcome="preempted")}
        lines = [rows.get(mark, request([1], 9)) for mark in "".join(marks)]
        return write(tmp_path / "trace", header(), *lines, end())

    @pytest.mark.parametrize(
        ("marks", "requests"),
        [
            ("aaRbbb", [2, 3]),
            ("RaaRRbFbRcR", [2, 2, 1]),
            ("aFa", [2]),
            ("apRpbRc", [1, 1, 1]),
        ],
    )
    def test_at_resets(self, tmp_path: Path, marks: str, requests: list[int]) -> None:
        engine = report(self.trace(tmp_path, marks))
        assert [figures.requests for figures in engine.rounds] == requests
        assert engine.all.requests == sum(requests)
        assert engine.split == (
            f"{len(requests)} rounds between resets" if len(requests) > 1 else "one round"
        )

    @pytest.mark.parametrize(
        ("marks", "rounds", "requests"),
        [
            ("aaaa", 2, [2, 2]),
            ("aaRaa", 2, [2, 2]),
            ("aaaaa", 2, [3, 2]),
            ("aa", 5, [1, 1]),
            ("papapp", 2, [1, 1]),
            ("ppp", 2, [0]),
            ("aRa", 1, [2]),
        ],
    )
    def test_as_asked_for(
        self, tmp_path: Path, marks: str, rounds: int, requests: list[int]
    ) -> None:
        engine = report(self.trace(tmp_path, marks), rounds=rounds)
        assert [figures.requests for figures in engine.rounds] == requests

    def test_without_resets(self, tmp_path: Path) -> None:
        short = report(self.trace(tmp_path, "a" * (MANY_REQUESTS - 1)))
        assert [figures.requests for figures in short.rounds] == [MANY_REQUESTS - 1]
        long = report(self.trace(tmp_path, "R" + "a" * MANY_REQUESTS + "R"))
        assert [each.requests for each in long.rounds] == [MANY_REQUESTS // STRETCHES] * STRETCHES
        assert long.split == "8 stretches with the same number of requests"

    def test_groups_of_a_request_are_in_one_round(self, tmp_path: Path) -> None:
        rows = [request([1], 9, group=group) for _ in range(4) for group in (0, 1)]
        trace = write(tmp_path / "trace", header(groups=[FULL, WINDOW]), *rows)
        engine = report(trace, rounds=4)
        assert [
            [group.tables.contiguity.tables for group in figures.groups]
            for figures in engine.rounds
        ] == [[1, 1]] * 4


def test_short_names(tmp_path: Path) -> None:
    def sections(*names: str) -> list[str]:
        found = []
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            found += read_sections(
                write(path, header(), header()) if "two" in name else write(path, header())
            )
        return labels(found)

    assert sections("stock.jsonl", "trace.4711") == ["stock", "trace.4711"]
    assert sections("two.jsonl", "one") == ["two #1", "two #2", "one"]
    twins = sections("a/trace.jsonl", "b/trace.jsonl")
    assert twins == [f"{tmp_path}/a/trace", f"{tmp_path}/b/trace"]


@pytest.mark.parametrize("name", ["tile_tokens", "rounds", "regions"])
def test_impossible_choices(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        Choices(**{name: 0})


@dataclass
class Slow:
    """A request of a random trace, and what is plainly true of it."""

    table: list[int]
    prompt: int
    hit: int
    outcome: str
    prefill: float | None

    def row(self) -> dict[str, Any]:
        return request(
            self.table, self.prompt, hit=self.hit, outcome=self.outcome, prefill=self.prefill
        )


NUM_BLOCKS = 40
TABLES = st.one_of(
    st.permutations(range(1, NUM_BLOCKS)).flatmap(
        lambda ids: st.integers(0, 12).map(lambda length: ids[:length])
    ),
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 9)).map(
        lambda t: [0] * t[0] + list(range(t[1], t[1] + t[2]))
    ),
)
REQUESTS = st.builds(
    Slow,
    TABLES,
    st.integers(0, 200),
    st.integers(0, 200),
    st.sampled_from(["stop", "length", "abort", "error", "preempted"]),
    st.one_of(st.none(), st.floats(0, 10)),
)


@given(
    st.lists(st.lists(REQUESTS, min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from([1, 16, 64, 128]),
)
def test_figures_as_defined(rounds: list[list[Slow]], tile_tokens: int) -> None:
    rows = [header(num_blocks=NUM_BLOCKS)]
    for requests in rounds:
        rows += [*(each.row() | {"request": str(len(rows) + n)} for n, each in enumerate(requests))]
        rows.append(reset())
    with tempfile.TemporaryDirectory() as folder:
        engine = report(write(Path(folder, "trace"), *rows), tile_tokens=tile_tokens)
    assert len(engine.rounds) == len(rounds)
    for figures, requests in zip(engine.rounds, rounds, strict=True):
        as_defined(figures, requests, tile_tokens)
    as_defined(engine.all, [each for requests in rounds for each in requests], tile_tokens)


def as_defined(figures: Figures, requests: list[Slow], tile_tokens: int) -> None:
    ended = [each for each in requests if each.outcome != "preempted"]
    aborted = [each for each in ended if each.outcome in ("abort", "error")]
    assert figures.preempted == len(requests) - len(ended)
    assert figures.aborted == len(aborted)
    assert figures.finished == len(ended) - len(aborted)
    assert figures.prompt_tokens == sum(each.prompt for each in ended)
    assert figures.hit_tokens == sum(each.hit for each in ended)
    latencies = [each.prefill for each in ended if each.prefill is not None]
    same(figures.prefill_ms, 1000 * statistics.mean(latencies) if latencies else math.nan)
    same(figures.median_prefill_ms, 1000 * statistics.median(latencies) if latencies else math.nan)
    used = {block for each in requests for block in each.table if block}
    assert figures.used_blocks == len(used)
    same(figures.high_water_ratio, max(used) / len(used) if used else math.nan)
    tile = max(1, tile_tokens // 16)
    group = figures.groups[0]
    contiguity_as_defined(group.tables, [each.table for each in requests], tile)
    in_prompts = [each.table[: math.ceil(each.prompt / 16)] for each in requests]
    contiguity_as_defined(group.prompts, in_prompts, tile)


def contiguity_as_defined(figures: Any, tables: list[list[int]], tile: int) -> None:
    seen = figures.contiguity
    runs = [runs_in(table) for table in tables]
    every = [run for each in runs for run in each]
    blocks = sum(map(len, every))
    pairs = [(a, b) for table in tables for a, b in pairwise(table) if a and b]
    assert (seen.tables, seen.blocks, seen.runs) == (len(tables), blocks, len(every))
    assert seen.longest_run == max(map(len, every), default=0)
    same(seen.blocks_per_run, blocks / len(every) if every else math.nan)
    means = [sum(map(len, each)) / len(each) for each in runs if each]
    same(figures.median_blocks_per_run, statistics.median(means) if means else math.nan)
    merged = sum(b == a + 1 for a, b in pairs)
    same(seen.mergeable_share, merged / len(pairs) if pairs else math.nan)
    kept = [[block for block in table if block] for table in tables]
    touched = sum(len({block // tile for block in table}) for table in kept)
    packed = sum(math.ceil(len(table) / tile) for table in kept)
    same(seen.tile_amplification, touched / packed if packed else math.nan)
    assert seen.descriptors(3) == 3 * len(every)


def runs_in(table: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    before = 0
    for block in table:
        if block and before and block == before + 1:
            runs[-1].append(block)
        elif block:
            runs.append([block])
        before = block
    return runs


def same(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, nan_ok=True)
