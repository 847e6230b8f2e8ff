"""Queue operations, 100,000 blocks: vLLM's class and the native one take turns in one run.

Two operations that undo each other, in a queue of cached blocks, so that it never runs empty; each
operation alone is in `bench_operations.py`, the pool around the queue in `bench_pool.py`. Then the
reset of the order, and the placement policies against `lru`.

Each benchmark knows the order of the queue that must come out and stores ``correct`` beside its
time. Not shown: what placement does to kernels.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from answers import CachedOrder, ids_of, is_sound, order_of, record, unhashed_order
from rivals import (
    BATCHES,
    BLOCKS,
    EXTENT,
    NUM_BLOCKS,
    POLICY,
    RIVALS,
    blocks_of,
    make_cached_queue,
    make_queue,
    native,
)

from pyblockpool.plugin.order import order_by_id

# Blocks a round, in pairs of single calls and in pairs of batches: multiples of each batch.
SINGLY, IN_BATCHES = 49_152, 98_304


def rotations(rival: str, ids: list[int], n: int, turns: int, singly: bool = False) -> list[int]:
    """The order of a queue after ``n`` blocks were taken and put back ``turns`` times."""
    expected = CachedOrder(POLICY[rival], ids)
    expected.rotate(n, turns, singly)
    return expected.ids()


@pytest.mark.parametrize("batch", BATCHES)
def test_popleft_n_append_n(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    rival: str,
    ids: list[int],
) -> None:
    queue = make_cached_queue(rival, ids)
    turns = (SINGLY if batch == 1 else IN_BATCHES) // batch

    def rotate() -> None:
        for _ in range(turns):
            queue.append_n(queue.popleft_n(batch))

    benchmark.pedantic(rotate, rounds=rounds, warmup_rounds=1)
    correct = order_of(queue) == rotations(rival, ids, batch, turns * (rounds + 1))
    operation = f"popleft_n+append_n {batch}, {order}"
    record(benchmark, operation, rival, turns * batch, correct and is_sound(queue))


@pytest.mark.parametrize("batch", BATCHES)
def test_popleft_n_prepend_n(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    rival: str,
    ids: list[int],
) -> None:
    """As without prefix caching: what was freed last is taken first."""
    queue = make_queue(rival, ids)
    turns = (SINGLY if batch == 1 else IN_BATCHES) // batch

    def to_and_fro() -> None:
        for _ in range(turns):
            queue.prepend_n(queue.popleft_n(batch))

    benchmark.pedantic(to_and_fro, rounds=rounds, warmup_rounds=1)
    correct = order_of(queue) == unhashed_order(POLICY[rival], ids) and is_sound(queue)
    operation = f"queue: popleft_n+prepend_n {batch}, {order}"
    record(benchmark, operation, rival, turns * batch, correct)


def paired(operation: str, batch: int, order: str) -> str:
    return f"{operation}, {order}" if batch == 1 else f"queue: {operation} {batch}, {order}"


@pytest.mark.parametrize("batch", BATCHES)
def test_popleft_append(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    rival: str,
    ids: list[int],
) -> None:
    """So many single calls, then as many that put the blocks back."""
    queue = make_cached_queue(rival, ids)
    turns = SINGLY // batch

    def rotate_one() -> None:
        for _ in range(turns):
            queue.append(queue.popleft())

    def rotate() -> None:
        for _ in range(turns):
            for block in [queue.popleft() for _ in range(batch)]:
                queue.append(block)

    benchmark.pedantic(rotate_one if batch == 1 else rotate, rounds=rounds, warmup_rounds=1)
    expected = rotations(rival, ids, batch, turns * (rounds + 1), singly=True)
    correct = order_of(queue) == expected and is_sound(queue)
    record(benchmark, paired("popleft+append", batch, order), rival, SINGLY, correct)


@pytest.mark.parametrize("batch", BATCHES)
def test_remove_append(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    rival: str,
    ids: list[int],
) -> None:
    """Each second block of the queue, as prefix hits take blocks out of the middle."""
    queue = make_cached_queue(rival, ids)
    by_id = blocks_of(BLOCKS[rival])
    hit = [by_id[block_id] for block_id in ids[::2]]
    tables = [hit[first : first + batch] for first in range(0, len(hit), batch)]

    def touch_and_free_one() -> None:
        for block in hit:
            queue.remove(block)
            queue.append(block)

    def touch_and_free() -> None:
        for table in tables:
            for block in table:
                queue.remove(block)
            queue.append_n(table)

    benchmark.pedantic(
        touch_and_free_one if batch == 1 else touch_and_free, rounds=rounds, warmup_rounds=1
    )
    expected = CachedOrder(POLICY[rival], ids)
    expected.touch(ids[::2])
    correct = order_of(queue) == expected.ids() and is_sound(queue)
    name = "remove+append" if batch == 1 else "remove+append_n"
    record(benchmark, paired(name, batch, order), rival, len(hit), correct)


@pytest.mark.parametrize("num_blocks", [*BATCHES, NUM_BLOCKS])
def test_construct(
    benchmark: Any,
    repeat: int,
    rounds: int,
    num_blocks: int,
    order: str,
    rival: str,
) -> None:
    """Once in the life of a pool; so many small ones that there is something to measure."""
    made: list[Any] = []
    pools = max(1, 4096 // num_blocks)
    ids = list(range(num_blocks))
    if order == "shuffled":
        random.Random(40244).shuffle(ids)

    def fresh_blocks() -> tuple[tuple[list[list[Any]]], dict[str, Any]]:
        made.clear()
        by_id = [[BLOCKS[rival](block_id) for block_id in range(num_blocks)] for _ in range(pools)]
        return ([[blocks[block_id] for block_id in ids] for blocks in by_id],), {}

    def construct(pools: list[list[Any]]) -> None:
        for blocks in pools:
            made.append(RIVALS[rival](blocks))

    benchmark.pedantic(construct, setup=fresh_blocks, rounds=rounds)
    expected = unhashed_order(POLICY[rival], ids)
    correct = len(made) == pools
    correct &= all(order_of(queue) == expected and is_sound(queue) for queue in made)
    whole_pool = num_blocks == NUM_BLOCKS and order == "id order"
    size = "" if num_blocks == NUM_BLOCKS else f" {num_blocks}"
    operation = f"{'' if whole_pool else 'queue: '}construct{size}, {order}"
    record(benchmark, operation, rival, num_blocks * pools, correct)


def rebuild(queue: Any, by_id: list[Any]) -> Any:
    """As sketched in the RFC: clear the links, and construct from the blocks in the order of ids.

    The least that Python can do. It brings blocks back that were taken out for good, and replaces
    the queue.
    """
    for block in by_id:
        block.prev_free_block = block.next_free_block = None
    return type(queue)(by_id)


def reorder(queue: Any, by_id: list[Any]) -> Any:
    order_by_id(queue)
    return queue


# Who resets the order -> class of the queue, how.
RESETS: dict[str, tuple[str, Callable[[Any, list[Any]], Any]]] = {
    "rebuild": ("vllm", rebuild),
    "python": ("vllm", reorder),
    "native": ("native", reorder),
    "sorted": ("sorted", reorder),
    "extent": ("extent", reorder),
}


@pytest.mark.parametrize("resetter", RESETS)
@pytest.mark.parametrize("num_blocks", [10_000, 100_000, 1_000_000])
def test_order_reset(
    benchmark: Any, repeat: int, rounds: int, num_blocks: int, resetter: str
) -> None:
    """What the plugin does to a shuffled queue, against the least that Python can do."""
    rival, reset = RESETS[resetter]
    ids = list(range(num_blocks))
    random.Random(40244).shuffle(ids)
    by_id = [BLOCKS[rival](block_id) for block_id in range(num_blocks)]
    made: list[Any] = [RIVALS[rival](by_id)]
    shuffled = CachedOrder(POLICY[rival], ids).ids()
    orders: list[bool] = []

    def shuffle() -> None:
        made[0].popleft_n(num_blocks)
        made[0].append_n([by_id[i] for i in ids])
        orders.append(order_of(made[0]) == shuffled)

    def put_in_order() -> None:
        made[0] = reset(made[0], by_id)

    benchmark.pedantic(put_in_order, setup=shuffle, rounds=rounds)
    correct = all(orders) and order_of(made[0]) == list(range(num_blocks)) and is_sound(made[0])
    record(benchmark, f"order reset {num_blocks:,}", resetter, num_blocks, correct)


# The policies of the native queue, all against `lru`.
POLICIES = tuple(EXTENT)


def grow_in_turn(queue: Any, tables: list[list[Any]]) -> None:
    """Each table grows by 40 blocks, one by one, beside its last block."""
    for _ in range(40):
        for table in tables:
            queue.grow_after(table[-1])
            table += queue.popleft_n(1)
            queue.grow_after(None)


def filled(policy: str, ids: list[int]) -> Any:
    """A queue full of cached blocks, longest free first in the order of ``ids``."""
    by_id = [BLOCKS["native"](block_id) for block_id in range(len(ids))]
    queue = native(policy)(by_id)
    queue.popleft_n(len(ids))
    queue.append_n([by_id[i] for i in ids])
    return queue


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_popleft_n_append_n(
    benchmark: Any, repeat: int, rounds: int, order: str, policy: str, ids: list[int]
) -> None:
    queue = filled(policy, ids)
    turns = IN_BATCHES // 512

    def rotate() -> None:
        for _ in range(turns):
            queue.append_n(queue.popleft_n(512))

    benchmark.pedantic(rotate, rounds=rounds, warmup_rounds=1)
    expected = CachedOrder(policy, ids)
    expected.rotate(512, turns * (rounds + 1))
    correct = order_of(queue) == expected.ids() and is_sound(queue)
    record(benchmark, f"policies: popleft_n+append_n 512, {order}", policy, turns * 512, correct)


@pytest.mark.parametrize("order", ["id order"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_growth(
    benchmark: Any, repeat: int, rounds: int, order: str, policy: str, ids: list[int]
) -> None:
    """200 requests grow by 40 blocks, one by one in turn, beside their last block."""
    queue = filled(policy, ids)
    tables: list[list[Any]] = []

    def release_and_admit() -> None:
        for table in tables:
            queue.append_n(table[::-1])
        tables[:] = [queue.popleft_n(20) for _ in range(200)]

    benchmark.pedantic(grow_in_turn, (queue, tables), setup=release_and_admit, rounds=rounds)
    tiles = [len({block.block_id // 8 for block in table}) for table in tables]
    correct = is_sound(queue) and (policy != "extent" or set(tiles) == {8})
    correct &= {len(table) for table in tables} == {60}
    correct &= len({block.block_id for table in tables for block in table}) == 200 * 60
    record(benchmark, "policies: growth by one block", policy, 200 * 40, correct)


class LightBlock:
    """Ten million of them fit into the memory of any machine."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.prev_free_block = self.next_free_block = None


@functools.lru_cache(maxsize=1)
def light_blocks(num_blocks: int) -> list[Any]:
    return [LightBlock(block_id) for block_id in range(num_blocks)]


def cached(policy: str, by_id: list[Any]) -> Any:
    """A queue full of cached blocks, in the order of ids."""
    queue = native(policy)(by_id)
    queue.append_n(queue.popleft_n(len(by_id)))
    return queue


def fragmented(policy: str, by_id: list[Any]) -> Any:
    """Every third extent is in use, the rest is unhashed.

    So there are many runs of clean extents, none of just the length that a request wants.
    """
    queue = native(policy)(by_id)
    queue.popleft_n(len(by_id))
    queue.prepend_n([block for block in by_id if block.block_id % 24 < 16])
    return queue


SIZES = [10_000, 100_000, 1_000_000, 10_000_000]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fill", [cached, fragmented])
@pytest.mark.parametrize("num_blocks", SIZES)
def test_flat_popleft_n(
    benchmark: Any,
    repeat: int,
    rounds: int,
    num_blocks: int,
    fill: Callable[[str, list[Any]], Any],
    policy: str,
) -> None:
    queue = fill(policy, light_blocks(num_blocks))
    free = queue.num_free_blocks
    put_back = queue.append_n if fill is cached else queue.prepend_n
    turns = IN_BATCHES // 512

    def turn() -> None:
        for _ in range(turns):
            put_back(queue.popleft_n(512))

    benchmark.pedantic(turn, rounds=rounds, warmup_rounds=1)
    correct = is_sound(queue) and queue.num_free_blocks == free
    taken = ids_of(queue.popleft_n(512))
    if fill is fragmented:
        correct &= taken == [block_id for block_id in range(768) if block_id % 24 < 16]
    else:
        correct &= taken == first_after(turns * (rounds + 1), policy, num_blocks)
    record(benchmark, f"flat: {fill.__name__}, {num_blocks:,}", policy, turns * 512, correct)


def first_after(turns: int, policy: str, num_blocks: int) -> list[int]:
    """The first 512 ids of a cached queue in the order of ids, after that many calls."""
    moved = turns * 512
    if moved + 512 <= num_blocks:  # nothing has come round again
        return list(range(moved, moved + 512))
    expected = CachedOrder(policy, range(num_blocks))
    expected.rotate(512, turns)
    return expected.take(512)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", SIZES)
def test_flat_growth(
    benchmark: Any, repeat: int, rounds: int, num_blocks: int, policy: str
) -> None:
    """100 requests grow by five extents, block by block in turn, in a fragmented pool."""
    queue = fragmented(policy, light_blocks(num_blocks))
    tables: list[list[Any]] = []

    def release_and_admit() -> None:
        for table in tables:
            queue.prepend_n(table[::-1])
        tables[:] = [queue.popleft_n(8) for _ in range(100)]

    benchmark.pedantic(grow_in_turn, (queue, tables), setup=release_and_admit, rounds=rounds)
    tiles = [len({block.block_id // 8 for block in table}) for table in tables]
    correct = is_sound(queue) and (policy != "extent" or set(tiles) == {6})
    correct &= len({block.block_id for table in tables for block in table}) == 100 * 48
    record(benchmark, f"flat: growth, {num_blocks:,}", policy, 100 * 40, correct)
