"""Queue operations, 100,000 blocks: vLLM's class and the native one take turns in one run.

Each benchmark knows the order of the queue that must come out and stores ``correct`` beside its
time. Not shown: the cost of the pool around the queue, and what placement does to kernels.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rivals import BLOCKS, NUM_BLOCKS, RIVALS

from pyblockpool.plugin.order import order_by_id

ROUNDS = 9
MakeQueue = Callable[[Sequence[int]], Any]


def order_of(queue: Any) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


def record(benchmark: Any, operation: str, rival: str, blocks_a_round: int, correct: bool) -> None:
    benchmark.extra_info.update(
        operation=operation, rival=rival, blocks_a_round=blocks_a_round, correct=correct
    )
    assert correct, f"{operation}: {rival} came out in a wrong order"


@pytest.mark.parametrize("batch", [1, 16, 512, 4096])
def test_popleft_n_append_n(
    benchmark: Any,
    repeat: int,
    batch: int,
    order: str,
    rival: str,
    ids: list[int],
    make_queue: MakeQueue,
) -> None:
    queue = make_queue(ids)
    turns = max(1, (50_000 if batch == 1 else 98_304) // batch)

    def rotate() -> None:
        for _ in range(turns):
            queue.append_n(queue.popleft_n(batch))

    benchmark.pedantic(rotate, rounds=ROUNDS, warmup_rounds=1)
    moved = turns * batch * (ROUNDS + 1) % len(ids)
    record(
        benchmark,
        f"popleft_n+append_n {batch}, {order}",
        rival,
        turns * batch,
        order_of(queue) == ids[moved:] + ids[:moved],
    )


def test_popleft_append(
    benchmark: Any, repeat: int, order: str, rival: str, ids: list[int], make_queue: MakeQueue
) -> None:
    queue = make_queue(ids)

    def rotate() -> None:
        for _ in range(50_000):
            queue.append(queue.popleft())

    benchmark.pedantic(rotate, rounds=ROUNDS, warmup_rounds=1)
    moved = 50_000 * (ROUNDS + 1) % len(ids)
    record(
        benchmark,
        f"popleft+append, {order}",
        rival,
        50_000,
        order_of(queue) == ids[moved:] + ids[:moved],
    )


def test_remove_append(
    benchmark: Any, repeat: int, order: str, rival: str, ids: list[int], make_queue: MakeQueue
) -> None:
    """Each second block of the queue, as prefix hits take blocks out of the middle."""
    queue = make_queue(ids)
    hit = queue.get_all_free_blocks()[::2]

    def touch_and_free() -> None:
        for block in hit:
            queue.remove(block)
            queue.append(block)

    benchmark.pedantic(touch_and_free, rounds=ROUNDS, warmup_rounds=1)
    record(
        benchmark,
        f"remove+append, {order}",
        rival,
        len(hit),
        order_of(queue) == ids[1::2] + ids[::2],
    )


@pytest.mark.parametrize("order", ["id order"])
def test_construct(benchmark: Any, repeat: int, order: str, rival: str) -> None:
    """Once in the life of a pool."""
    made: list[Any] = []

    def fresh_blocks() -> tuple[tuple[list[Any]], dict[str, Any]]:
        made.clear()
        return ([BLOCKS[rival](block_id) for block_id in range(NUM_BLOCKS)],), {}

    benchmark.pedantic(
        lambda blocks: made.append(RIVALS[rival](blocks)), setup=fresh_blocks, rounds=ROUNDS
    )
    record(
        benchmark,
        f"construct, {order}",
        rival,
        NUM_BLOCKS,
        order_of(made[0]) == list(range(NUM_BLOCKS)),
    )


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
}


@pytest.mark.parametrize("resetter", RESETS)
@pytest.mark.parametrize("num_blocks", [10_000, 100_000, 1_000_000])
def test_order_reset(benchmark: Any, repeat: int, num_blocks: int, resetter: str) -> None:
    """What the plugin does to a shuffled queue, against the least that Python can do."""
    rival, reset = RESETS[resetter]
    ids = list(range(num_blocks))
    random.Random(40244).shuffle(ids)
    by_id = [BLOCKS[rival](block_id) for block_id in range(num_blocks)]
    made: list[Any] = [RIVALS[rival]([by_id[i] for i in ids])]

    def shuffle() -> None:
        made[0].popleft_n(num_blocks)
        made[0].append_n([by_id[i] for i in ids])
        assert order_of(made[0]) == ids

    def put_in_order() -> None:
        made[0] = reset(made[0], by_id)

    benchmark.pedantic(put_in_order, setup=shuffle, rounds=ROUNDS)
    correct = order_of(made[0]) == list(range(num_blocks))
    record(benchmark, f"order reset {num_blocks:,}", resetter, num_blocks, correct)


# Policies of the native queue, all against `lru`; `extent` with the 8 blocks of 16 tokens that are
# its default.
POLICIES = {"lru": 1, "sorted": 1, "extent": 8}


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
    queue = RIVALS["native"](by_id, policy=policy, size=POLICIES[policy])
    queue.popleft_n(len(ids))
    queue.append_n([by_id[i] for i in ids])
    return queue


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_popleft_n_append_n(
    benchmark: Any, repeat: int, order: str, policy: str, ids: list[int]
) -> None:
    queue = filled(policy, ids)
    turns = 98_304 // 512

    def rotate() -> None:
        for _ in range(turns):
            queue.append_n(queue.popleft_n(512))

    benchmark.pedantic(rotate, rounds=ROUNDS, warmup_rounds=1)
    correct = sorted(order_of(queue)) == list(range(len(ids))) and queue.check() == ""
    record(benchmark, f"policies: popleft_n+append_n 512, {order}", policy, turns * 512, correct)


@pytest.mark.parametrize("order", ["id order"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_growth(
    benchmark: Any, repeat: int, order: str, policy: str, ids: list[int]
) -> None:
    """200 requests grow by 40 blocks, one by one in turn, beside their last block."""
    queue = filled(policy, ids)
    tables: list[list[Any]] = []

    def release_and_admit() -> None:
        for table in tables:
            queue.append_n(table[::-1])
        tables[:] = [queue.popleft_n(20) for _ in range(200)]

    benchmark.pedantic(grow_in_turn, (queue, tables), setup=release_and_admit, rounds=ROUNDS)
    tiles = [len({block.block_id // 8 for block in table}) for table in tables]
    correct = queue.check() == "" and (policy != "extent" or set(tiles) == {8})
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
    queue = RIVALS["native"](by_id, policy=policy, size=POLICIES[policy])
    queue.append_n(queue.popleft_n(len(by_id)))
    return queue


def fragmented(policy: str, by_id: list[Any]) -> Any:
    """Every third extent is in use, the rest is unhashed.

    So there are many runs of clean extents, none of just the length that a request wants.
    """
    queue = RIVALS["native"](by_id, policy=policy, size=POLICIES[policy])
    queue.popleft_n(len(by_id))
    queue.prepend_n([block for block in by_id if block.block_id % 24 < 16])
    return queue


@pytest.fixture
def rounds(num_blocks: int, repeat: int) -> int:
    """What takes long to set up is measured once."""
    if num_blocks > 1_000_000 and repeat > 0:
        pytest.skip("once is enough")
    return ROUNDS


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
    turns = 98_304 // 512

    def turn() -> None:
        for _ in range(turns):
            put_back(queue.popleft_n(512))

    benchmark.pedantic(turn, rounds=rounds, warmup_rounds=1)
    correct = queue.check() == "" and queue.num_free_blocks == free
    if fill is fragmented:
        taken = [block.block_id for block in queue.popleft_n(512)]
        correct &= taken == [block_id for block_id in range(768) if block_id % 24 < 16]
    record(benchmark, f"flat: {fill.__name__}, {num_blocks:,}", policy, turns * 512, correct)


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
    correct = queue.check() == "" and (policy != "extent" or set(tiles) == {6})
    correct &= len({block.block_id for table in tables for block in table}) == 100 * 48
    record(benchmark, f"flat: growth, {num_blocks:,}", policy, 100 * 40, correct)
