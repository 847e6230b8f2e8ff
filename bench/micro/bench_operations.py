"""Each operation of the queue alone: the whole queue of 100,000 blocks is filled, emptied or read.

A pair of operations that undo each other (`bench_queue.py`) hides which of the two costs what, and
whether one of them is slower than vLLM's. Each round begins with the same queue, set up again and
not timed. All blocks are cached, but for `prepend_n`, which takes those without a hash.

Not shown: a queue runs from full to empty here, in an engine it does neither.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from answers import CachedOrder, ids_of, is_sound, order_of, record, unhashed_order
from rivals import BATCHES, BLOCKS, NUM_BLOCKS, POLICY, blocks_of, make_cached_queue


class Filled:
    """A queue, what it is filled with, and what it has handed out."""

    def __init__(self, rival: str, ids: list[int]) -> None:
        by_id = blocks_of(BLOCKS[rival])
        self.queue = make_cached_queue(rival, ids)
        self.blocks = [by_id[block_id] for block_id in ids]
        self.taken: list[Any] = []
        self.expected = CachedOrder(POLICY[rival], ids)

    def empty(self) -> None:
        self.queue.popleft_n(self.queue.num_free_blocks)

    def fill(self) -> None:
        self.empty()
        self.queue.append_n(self.blocks)
        self.taken.clear()

    def batches(self, batch: int) -> list[list[Any]]:
        """All blocks, in pieces; the last one may be shorter."""
        return [self.blocks[first : first + batch] for first in range(0, NUM_BLOCKS, batch)]


@pytest.fixture
def filled(rival: str, ids: list[int]) -> Filled:
    return Filled(rival, ids)


def sizes(batch: int) -> list[int]:
    whole, rest = divmod(NUM_BLOCKS, batch)
    return [batch] * whole + [rest] * (rest > 0)


@pytest.mark.parametrize("batch", BATCHES)
def test_popleft_n(
    benchmark: Any, repeat: int, rounds: int, batch: int, order: str, rival: str, filled: Filled
) -> None:
    queue, calls = filled.queue, sizes(batch)

    def take_all() -> None:
        filled.taken += [queue.popleft_n(n) for n in calls]

    benchmark.pedantic(take_all, setup=filled.fill, rounds=rounds, warmup_rounds=1)
    if batch == 1:
        expected = [[block_id] for block_id in filled.expected.take(NUM_BLOCKS, singly=True)]
    else:
        expected = [filled.expected.take(n) for n in calls]
    correct = list(map(ids_of, filled.taken)) == expected and order_of(queue) == []
    correct &= queue.num_free_blocks == 0 and is_sound(queue)
    record(benchmark, f"queue: popleft_n {batch}, {order}", rival, NUM_BLOCKS, correct)


def test_popleft(
    benchmark: Any, repeat: int, rounds: int, order: str, rival: str, filled: Filled
) -> None:
    queue = filled.queue

    def take_all() -> None:
        filled.taken += [queue.popleft() for _ in range(NUM_BLOCKS)]

    benchmark.pedantic(take_all, setup=filled.fill, rounds=rounds, warmup_rounds=1)
    correct = ids_of(filled.taken) == filled.expected.take(NUM_BLOCKS, singly=True)
    correct &= order_of(queue) == [] and queue.num_free_blocks == 0 and is_sound(queue)
    record(benchmark, f"queue: popleft, {order}", rival, NUM_BLOCKS, correct)


@pytest.mark.parametrize("batch", BATCHES)
def test_append_n(
    benchmark: Any, repeat: int, rounds: int, batch: int, order: str, rival: str, filled: Filled
) -> None:
    queue, tables = filled.queue, filled.batches(batch)

    def put_all() -> None:
        for table in tables:
            queue.append_n(table)

    benchmark.pedantic(put_all, setup=filled.empty, rounds=rounds, warmup_rounds=1)
    correct = order_of(queue) == filled.expected.ids() and is_sound(queue)
    correct &= queue.num_free_blocks == NUM_BLOCKS
    record(benchmark, f"queue: append_n {batch}, {order}", rival, NUM_BLOCKS, correct)


def test_append(
    benchmark: Any, repeat: int, rounds: int, order: str, rival: str, filled: Filled
) -> None:
    queue = filled.queue

    def put_all() -> None:
        for block in filled.blocks:
            queue.append(block)

    benchmark.pedantic(put_all, setup=filled.empty, rounds=rounds, warmup_rounds=1)
    correct = order_of(queue) == filled.expected.ids() and is_sound(queue)
    correct &= queue.num_free_blocks == NUM_BLOCKS
    record(benchmark, f"queue: append, {order}", rival, NUM_BLOCKS, correct)


@pytest.mark.parametrize("batch", BATCHES)
def test_prepend_n(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    rival: str,
    ids: list[int],
    filled: Filled,
) -> None:
    queue, tables = filled.queue, filled.batches(batch)

    def put_all() -> None:
        for table in tables:
            queue.prepend_n(table)

    benchmark.pedantic(put_all, setup=filled.empty, rounds=rounds, warmup_rounds=1)
    last_first = [block.block_id for table in reversed(tables) for block in table]
    correct = order_of(queue) == unhashed_order(POLICY[rival], last_first) and is_sound(queue)
    correct &= queue.num_free_blocks == NUM_BLOCKS
    record(benchmark, f"queue: prepend_n {batch}, {order}", rival, NUM_BLOCKS, correct)


def test_remove(
    benchmark: Any,
    repeat: int,
    rounds: int,
    order: str,
    rival: str,
    ids: list[int],
    filled: Filled,
) -> None:
    """Each second block, as prefix hits take blocks out of the middle."""
    queue, hit = filled.queue, filled.blocks[::2]

    def touch() -> None:
        for block in hit:
            queue.remove(block)

    benchmark.pedantic(touch, setup=filled.fill, rounds=rounds, warmup_rounds=1)
    correct = order_of(queue) == CachedOrder(POLICY[rival], ids[1::2]).ids() and is_sound(queue)
    correct &= queue.num_free_blocks == NUM_BLOCKS - len(hit)
    correct &= all(block.next_free_block is None for block in hit)
    record(benchmark, f"queue: remove, {order}", rival, len(hit), correct)


@pytest.mark.parametrize("batch", BATCHES)
def test_iter_blocks_after(
    benchmark: Any, repeat: int, rounds: int, batch: int, order: str, rival: str, filled: Filled
) -> None:
    """From the block at which the last walk has ended, as lazy offloading goes on in each step."""
    queue, calls = filled.queue, len(sizes(batch))

    def walk() -> None:
        filled.taken.clear()
        cursor = None
        for _ in range(calls):
            seen = list(islice(queue.iter_blocks_after(cursor), batch))
            filled.taken += seen
            cursor = seen[-1]

    benchmark.pedantic(walk, rounds=rounds, warmup_rounds=1)
    correct = ids_of(filled.taken) == filled.expected.ids() == order_of(queue)
    operation = f"queue: iter_blocks_after {batch}, {order}"
    record(benchmark, operation, rival, NUM_BLOCKS, correct and is_sound(queue))


def test_get_all_free_blocks(
    benchmark: Any, repeat: int, rounds: int, order: str, rival: str, filled: Filled
) -> None:
    def read() -> None:
        filled.taken = filled.queue.get_all_free_blocks()

    benchmark.pedantic(read, rounds=rounds, warmup_rounds=1)
    correct = ids_of(filled.taken) == filled.expected.ids() and is_sound(filled.queue)
    record(benchmark, f"queue: get_all_free_blocks, {order}", rival, NUM_BLOCKS, correct)


def test_links(
    benchmark: Any, repeat: int, rounds: int, order: str, rival: str, filled: Filled
) -> None:
    """Read from outside, from the fake head to the fake tail."""
    queue = filled.queue

    def walk() -> None:
        filled.taken.clear()
        tail = queue.fake_free_list_tail
        block = queue.fake_free_list_head.next_free_block
        while block is not tail:
            filled.taken.append(block)
            block = block.next_free_block

    benchmark.pedantic(walk, rounds=rounds, warmup_rounds=1)
    correct = ids_of(filled.taken) == filled.expected.ids() and is_sound(queue)
    record(benchmark, f"queue: links read, {order}", rival, NUM_BLOCKS, correct)


@pytest.mark.parametrize("order", ["id order"])
def test_num_free_blocks(
    benchmark: Any, repeat: int, rounds: int, order: str, rival: str, filled: Filled
) -> None:
    """Read as often as there are blocks."""
    queue = filled.queue

    def read() -> None:
        for _ in range(NUM_BLOCKS):
            number = queue.num_free_blocks
        filled.taken = [number]

    benchmark.pedantic(read, rounds=rounds, warmup_rounds=1)
    correct = filled.taken == [NUM_BLOCKS] and is_sound(queue)
    record(benchmark, "queue: num_free_blocks read", rival, NUM_BLOCKS, correct)
