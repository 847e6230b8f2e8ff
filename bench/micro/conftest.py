"""Rivals, pools and the table of ratios for the micro benchmarks."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from types import MemberDescriptorType
from typing import Any

import pytest
from provenance import provenance
from rich.console import Console
from rich.table import Table
from rivals import BLOCKS, NUM_BLOCKS, RIVALS
from vllm.v1.core.kv_cache_utils import KVCacheBlock

# What the project set out to reach, as a ratio to vLLM's class in the same run.
TARGETS = {
    "popleft_n+append_n 512, id order": 6.0,
    "popleft_n+append_n 512, shuffled": 4.0,
    "popleft+append, id order": 4.0,
    "remove+append, id order": 2.0,
    "order reset 100,000": 100.0,
}


@pytest.fixture(params=range(3), ids=lambda repeat: f"repeat{repeat}")
def repeat(request: pytest.FixtureRequest) -> int:
    """Outermost parameter: the rivals take turns, so that drift of the machine hits both."""
    return int(request.param)


@pytest.fixture(params=["id order", "shuffled"], ids=["id_order", "shuffled"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(RIVALS, reverse=True))
def rival(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ids(order: str) -> list[int]:
    """The block ids of a pool of NUM_BLOCKS in the order of its queue."""
    ids = list(range(NUM_BLOCKS))
    if order == "shuffled":
        random.Random(40244).shuffle(ids)
    return ids


@pytest.fixture
def make_queue(rival: str) -> Iterator[Callable[[Sequence[int]], Any]]:
    """A queue of fresh blocks, made in id order as vLLM's pool makes them."""

    def make(ids: Sequence[int]) -> Any:
        blocks = [BLOCKS[rival](block_id) for block_id in range(len(ids))]
        return RIVALS[rival]([blocks[block_id] for block_id in ids])

    yield make
    assert isinstance(vars(KVCacheBlock)["prev_free_block"], MemberDescriptorType)


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    wrong = [b["name"] for b in output_json["benchmarks"] if not b["extra_info"].get("correct")]
    if wrong:
        raise RuntimeError(f"benchmarks with a wrong or unchecked answer: {', '.join(wrong)}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="save the ratios, with where and when, as JSON")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for bench in session.benchmarks if session else ():
        info = bench.extra_info
        if info.get("correct"):
            times[info["operation"]][info["rival"]].append(
                bench.stats.median / info["blocks_a_round"] * 1e9
            )
    if not times:
        return
    operations = {
        operation: {name: round(median(ns), 3) for name, ns in by_rival.items()}
        for operation, by_rival in times.items()
    }
    table = Table(title="ns a block, medians of interleaved repeats")
    for column in ("operation", "rivals", "ours", "ratio", "to reach"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for operation, ns in operations.items():
        target = TARGETS.get(operation)
        ours = {name: time for name, time in ns.items() if name in ("native", "sorted", "extent")}
        rivals = {name: time for name, time in ns.items() if name not in ours}
        best = min(rivals.values())
        table.add_row(
            operation,
            ", ".join(f"{name} {time:.1f}" for name, time in rivals.items()),
            ", ".join(f"{name} {time:.2f}" for name, time in ours.items()),
            ", ".join(f"{best / time:.2f}x" for time in ours.values()),
            f"{target:.0f}x" if target else "",
        )
    Console().print(table)
    results = terminalreporter.config.getoption("--results")
    if results:
        saved = {**provenance(), "num_blocks": NUM_BLOCKS, "ns_per_block": operations}
        results.write_text(json.dumps(saved, indent=1) + "\n")
