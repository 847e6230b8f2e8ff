"""What the benchmark of transfers copies, and where its tables come from."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from implementations import HAS_VLLM

from pyblockpool.contiguity import Copies
from pyblockpool.errors import ReplayError
from pyblockpool.replay import Setup

pytest.importorskip("torch")
import transfer  # bench/
import transfer_tables


@given(st.lists(st.integers(1, 40), max_size=60), st.randoms(use_true_random=False))
def test_merged_copies_are_the_copies_of_all_blocks(gaps: list[int], dice: random.Random) -> None:
    """And as many as the figures of the package say."""
    source = np.cumsum([1 if gap > 10 else gap for gap in gaps], dtype=np.int32)
    destination = np.arange(len(gaps), dtype=np.int32)
    at = dice.randint(0, len(gaps))
    destination = np.concatenate([destination[at:], destination[:at]])
    merged = transfer.merged(source, destination)
    spelled_out = [(s + i, d + i) for s, d, n in merged for i in range(n)]
    assert spelled_out == list(zip(source.tolist(), destination.tolist(), strict=True))
    figures = Copies()
    figures.add(source, destination)
    assert len(merged) == figures.runs


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is what is compared with")
@pytest.mark.parametrize("queue", transfer_tables.QUEUES)
@pytest.mark.parametrize("chunk", [None, 200])
def test_a_queue_alone_has_the_tables_of_a_replay(queue: str, chunk: int | None) -> None:
    """So tables made on a machine without vLLM are those of one with it."""
    requests = transfer_tables.made_requests(120, seed=3)
    setup = Setup(num_blocks=2_000, residents=12, chunk=chunk)
    value = transfer_tables.QUEUES[queue]
    replayed = transfer_tables.replayed_tables(value, requests, setup)
    alone = transfer_tables.tables_of_a_queue_alone(value, requests, setup)
    assert [t.tolist() for t in alone] == [t.tolist() for t in replayed]
    assert sum(map(len, alone)) > 2 * setup.num_blocks


@pytest.mark.parametrize("how", ["replayed_tables", "tables_of_a_queue_alone"])
def test_what_does_not_fit_is_refused(how: str) -> None:
    if how == "replayed_tables" and not HAS_VLLM:
        pytest.skip("a replay needs vLLM")
    requests = transfer_tables.made_requests(20, seed=3)
    with pytest.raises(ReplayError, match="take more blocks"):
        getattr(transfer_tables, how)(None, requests, Setup(num_blocks=20, residents=2))


@pytest.mark.parametrize("method", transfer.METHODS)
def test_copies_arrive_and_touch_nothing_else(method: str) -> None:
    memory = transfer.Memory(transfer.Layout("tiny", 64, 1), (10, 10), "cpu")
    source, destination = np.array([1, 2, 5, 6], np.int32), np.array([3, 4, 0, 1], np.int32)
    copies = memory.copies(source, destination, method)
    memory.check([(source, destination)], [copies])
    with pytest.raises(RuntimeError, match="did not arrive"):
        memory.check([(source, destination)], [memory.copies(source[::-1], destination, method)])
    stray = memory.copies(source[:1], np.array([9], np.int32), method)
    with pytest.raises(RuntimeError, match="beside"):
        memory.check([(source, destination)], [[*copies, *stray]])


def test_tables_lie_one_behind_the_other_in_a_buffer() -> None:
    tables = [np.arange(length, dtype=np.int32) for length in (3, 4, 2)]
    pairs = transfer.to_buffer(tables, 8)
    assert [destination.tolist() for _, destination in pairs] == [[0, 1, 2], [3, 4, 5, 6], [0, 1]]
    assert all(ours is table for (ours, _), table in zip(pairs, tables, strict=True))
