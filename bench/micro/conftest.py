"""Interleaving, the proof that each answer was checked, and the table for the micro benchmarks.

    pytest bench/micro -o python_files='bench_*.py' --benchmark-disable-gc --results=FILE [--short]

All rivals do the same thing in turn, and all of it is repeated. ``--short`` measures the same
operations with fewer rounds and repeats.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from types import MemberDescriptorType
from typing import Any

import pytest
from provenance import provenance
from rich.console import Console
from rich.table import Table
from rivals import NUM_BLOCKS, RIVALS
from vllm.v1.core.kv_cache_utils import KVCacheBlock

# What the project set out to reach, as a ratio to vLLM's class in the same run.
TARGETS = {
    "popleft_n+append_n 512, id order": 6.0,
    "popleft_n+append_n 512, shuffled": 4.0,
    "popleft+append, id order": 4.0,
    "remove+append, id order": 2.0,
    "order reset 100,000": 100.0,
}
OURS = ("native", "sorted", "extent")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="save the times, with where and when, as JSON")
    parser.addoption("--short", action="store_true", help="fewer rounds and repeats")


def repeats(config: pytest.Config) -> int:
    return 2 if config.getoption("--short") else 3


def rounds_of(config: pytest.Config) -> int:
    return 3 if config.getoption("--short") else 9


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "repeat" in metafunc.fixturenames:
        metafunc.parametrize("repeat", range(repeats(metafunc.config)), ids="repeat{}".format)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rivals take turns, so that drift of the machine hits all of them, and repeats come last."""
    names = ("rival", "resetter", "policy", "adder")

    def what(item: Any) -> tuple[Any, ...]:
        params = {k: str(v) for k, v in item.callspec.params.items() if k not in names}
        return item.originalname, *sorted(params.items())

    first = {key: place for place, key in reversed(list(enumerate(map(what, items))))}
    items.sort(key=lambda item: (item.callspec.params["repeat"], first[what(item)]))  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    found = item.funcargs["benchmark"].extra_info  # type: ignore[attr-defined]
    assert found.get("correct") is True, "the answer of this benchmark was not checked"
    assert isinstance(vars(KVCacheBlock)["prev_free_block"], MemberDescriptorType), (
        "the links of vLLM's own class of blocks are native: its queue would be slower from here on"
    )


@pytest.fixture
def rounds(request: pytest.FixtureRequest, repeat: int) -> int:
    """What takes long to set up is measured once."""
    large = 100_000 if request.config.getoption("--short") else 1_000_000
    if repeat > 0 and request.node.callspec.params.get("num_blocks", NUM_BLOCKS) > large:
        pytest.skip("once is enough")
    return rounds_of(request.config)


@pytest.fixture(params=["id order", "shuffled"], ids=["id_order", "shuffled"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(RIVALS))
def rival(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ids(order: str) -> list[int]:
    """The block ids of a pool of NUM_BLOCKS in the order of its queue."""
    ids = list(range(NUM_BLOCKS))
    if order == "shuffled":
        random.Random(40244).shuffle(ids)
    return ids


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    wrong = [b["name"] for b in output_json["benchmarks"] if not b["extra_info"].get("correct")]
    if wrong:
        raise RuntimeError(f"benchmarks with a wrong or unchecked answer: {', '.join(wrong)}")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    session = getattr(config, "_benchmarksession", None)
    times: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for bench in session.benchmarks if session else ():
        info = bench.extra_info
        if info.get("correct"):
            each = [seconds / info["blocks_a_round"] * 1e9 for seconds in bench.stats.data]
            times[info["operation"]][info["rival"]].append(each)
    if not times:
        return
    operations = {
        operation: {
            name: round(median(map(median, repeats)), 3) for name, repeats in by_rival.items()
        }
        for operation, by_rival in times.items()
    }
    Console(width=None if terminalreporter.isatty else 130).print(table_of(operations))
    results = config.getoption("--results")
    if not results:
        return
    if exitstatus != pytest.ExitCode.OK:
        terminalreporter.write_line(f"{results} is not written: not every benchmark passed")
        return
    saved = {
        **provenance(),
        "num_blocks": NUM_BLOCKS,
        "repeats": repeats(config),
        "rounds": rounds_of(config),
        "ns_per_block": operations,
        "quartiles": {
            operation: {name: quartiles(repeats) for name, repeats in by_rival.items()}
            for operation, by_rival in times.items()
        },
    }
    results.write_text(json.dumps(saved, indent=1) + "\n")


def quartiles(repeats: list[list[float]]) -> list[float]:
    """The first and the third, of all rounds of all repeats."""
    low, _, high = quantiles([time for rounds in repeats for time in rounds], method="inclusive")
    return [round(low, 3), round(high, 3)]


def table_of(operations: dict[str, dict[str, float]]) -> Table:
    """Times, and how many times faster than the best rival ours are; in red where they are not."""
    table = Table(title="ns a block, medians of interleaved repeats")
    table.add_column("operation")
    table.add_column("rivals", justify="right")
    for name in (*OURS, "to reach"):
        table.add_column(name, justify="right", no_wrap=True)
    for operation, ns in operations.items():
        rivals = {name: time for name, time in ns.items() if name not in OURS}
        best = min(rivals.values(), default=None)
        cells = []
        for name in OURS:
            ratio = best / ns[name] if best and name in ns else None
            cell = f"{ns[name]:.1f}" if name in ns else ""
            if ratio:
                cell += f"  [{'red' if ratio < 1 else 'green'}]{ratio:.2f}x[/]"
            cells.append(cell)
        target = TARGETS.get(operation)
        table.add_row(
            operation,
            ", ".join(f"{name} {time:.1f}" for name, time in rivals.items()),
            *cells,
            f"{target:.0f}x" if target else "",
        )
    return table
