"""vLLM's real `BlockPool` around each queue: what an engine calls, with the pool's own Python.

`get_new_blocks`, `free_blocks` and `touch` of a pool of 100,000 blocks, block 0 being the null
block. With caching on, each free block has a hash, which `get_new_blocks` evicts; tables are freed
tail first. Each round begins with the same pool, set up again and not timed.

Not shown: the scheduler and the managers around the pool. Setting up goes through all blocks, so
the caches of the processor hold few of those that are measured: with small pools, or blocks that
were just in use, everything is faster, and the differences are others.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from answers import CachedOrder, ids_of, is_sound, order_of, record, unhashed_order
from rivals import BLOCK_SIZE, NUM_BLOCKS, POLICY, POOLS
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

# Blocks a round: the same of all batches.
MOVED = 16_384
pytestmark = [
    pytest.mark.parametrize("batch", [1, 16, 512]),
    pytest.mark.parametrize("caching", ["caching on", "caching off"]),
]


@functools.lru_cache(maxsize=1)
def hashes() -> list[Any]:
    """One for each block."""
    return [
        make_block_hash_with_group_id(BlockHash(block_id.to_bytes(32, "big")), 0)
        for block_id in range(NUM_BLOCKS)
    ]


@functools.lru_cache(maxsize=8)
def pool_of(rival: str, caching: bool) -> Any:
    pool = POOLS[rival](NUM_BLOCKS, caching, BLOCK_SIZE)
    # Single blocks share an extent, at first that of the null block: move on from there.
    queue = pool.free_block_queue
    queue.append_n([queue.popleft() for _ in range(queue.num_free_blocks)])
    return pool


class Setup:
    """A pool of which all blocks are free, and what was done to them.

    Attributes:
        ids: all but the null block, in the order in which they are freed.
        tables: blocks in use, a list for each request.
    """

    def __init__(self, rival: str, caching: str, ids: list[int]) -> None:
        self.policy = POLICY[rival]
        self.caching = caching == "caching on"
        self.pool = pool_of(rival, self.caching)
        self.queue = self.pool.free_block_queue
        self.ids = [block_id for block_id in ids if block_id]
        self.order = [self.pool.blocks[block_id] for block_id in self.ids]
        self.tables: list[list[Any]] = []

    def all_free(self) -> None:
        """Everything free, in the order of ids that is asked for, and cached if that is on."""
        self.tables.clear()
        self.queue.popleft_n(self.queue.num_free_blocks)
        for block in self.order:
            block.ref_cnt = 0
        if not self.caching:
            self.queue.prepend_n(self.order)
            return
        cache = self.pool.cached_block_hash_to_block
        for block in self.order:
            if block.block_hash is None:
                key = hashes()[block.block_id]
                block.set_block_hash(key, BLOCK_SIZE)
                cache.insert(key, block)
        self.queue.append_n(self.order)

    def in_use(self, batch: int) -> None:
        """The first blocks in the order of ids that is asked for are in tables of so many."""
        self.all_free()
        self.tables += tables_of(self.order[:MOVED], batch)
        for table in self.tables:
            for block in table:
                self.queue.remove(block)
                block.ref_cnt = 1

    def is_sound(self) -> bool:
        """The pool, the hashes and the queue agree."""
        cached = [block for block in self.order if block.block_hash is not None]
        found = self.pool.cached_block_hash_to_block
        return (
            is_sound(self.queue)
            and len(found) == len(cached)
            and all(found.contain(block.block_hash, block.block_id) for block in cached)
        )


def tables_of(blocks: list[Any], batch: int) -> list[list[Any]]:
    return [blocks[first : first + batch] for first in range(0, len(blocks), batch)]


@pytest.fixture
def setup(rival: str, caching: str, ids: list[int]) -> Setup:
    return Setup(rival, caching, ids)


def test_get_new_blocks(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    caching: str,
    rival: str,
    setup: Setup,
) -> None:
    pool, calls = setup.pool, MOVED // batch

    def allocate() -> None:
        setup.tables += [pool.get_new_blocks(batch) for _ in range(calls)]

    benchmark.pedantic(allocate, setup=setup.all_free, rounds=rounds, warmup_rounds=1)
    order_before = CachedOrder(setup.policy, setup.ids)
    if not setup.caching:
        expected = tables_of(unhashed_order(setup.policy, setup.ids)[:MOVED], batch)
    elif batch == 1:
        expected = tables_of(order_before.take(MOVED, singly=True), batch)
    else:
        expected = [order_before.take(batch) for _ in range(calls)]
    taken = [block for table in setup.tables for block in table]
    correct = list(map(ids_of, setup.tables)) == expected and setup.is_sound()
    correct &= all(block.ref_cnt == 1 and block.block_hash is None for block in taken)
    correct &= pool.get_num_free_blocks() == NUM_BLOCKS - 1 - MOVED
    operation = f"pool: get_new_blocks {batch}, {caching}, {order}"
    record(benchmark, operation, rival, MOVED, correct)


def test_free_blocks(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    caching: str,
    rival: str,
    setup: Setup,
) -> None:
    pool = setup.pool
    tail_first: list[list[Any]] = []

    def in_use() -> None:
        setup.in_use(batch)
        tail_first[:] = [table[::-1] for table in setup.tables]

    def free() -> None:
        for table in tail_first:
            pool.free_blocks(table)

    benchmark.pedantic(free, setup=in_use, rounds=rounds, warmup_rounds=1)
    rest = setup.ids[MOVED:]
    if setup.caching:
        freed = [block_id for table in tail_first for block_id in ids_of(table)]
        expected = CachedOrder(setup.policy, rest + freed).ids()
    else:
        freed = [block_id for table in reversed(tail_first) for block_id in ids_of(table)]
        expected = unhashed_order(setup.policy, freed + rest)
    correct = order_of(setup.queue) == expected and setup.is_sound()
    correct &= all(block.ref_cnt == 0 for block in setup.order)
    operation = f"pool: free_blocks {batch}, {caching}, {order}"
    record(benchmark, operation, rival, MOVED, correct)


def test_touch(
    benchmark: Any,
    repeat: int,
    rounds: int,
    batch: int,
    order: str,
    caching: str,
    rival: str,
    setup: Setup,
) -> None:
    """Each second free block; without caching vLLM has nothing to touch, but it can be called."""
    pool = setup.pool
    hit = setup.order[: 2 * MOVED : 2]
    tables = tables_of(hit, batch)

    def touch() -> None:
        for table in tables:
            pool.touch(table)

    benchmark.pedantic(touch, setup=setup.all_free, rounds=rounds, warmup_rounds=1)
    touched = set(ids_of(hit))
    left = [block_id for block_id in setup.ids if block_id not in touched]
    if setup.caching:
        expected = CachedOrder(setup.policy, left).ids()
    else:
        expected = unhashed_order(setup.policy, left)
    correct = order_of(setup.queue) == expected and setup.is_sound()
    correct &= all(block.ref_cnt == 1 for block in hit)
    operation = f"pool: touch {batch}, {caching}, {order}"
    record(benchmark, operation, rival, MOVED, correct)
