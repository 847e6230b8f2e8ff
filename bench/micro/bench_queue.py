"""Queue operations, 100,000 blocks: vLLM's class and the native one take turns in one run.

Each benchmark knows the order of the queue that must come out and stores ``correct`` beside its
time. Not shown: the cost of the pool around the queue, and what placement does to kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rivals import BLOCKS, NUM_BLOCKS, RIVALS
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from pyblockpool import FreeBlockQueue

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


@pytest.mark.parametrize("order", ["shuffled"])
@pytest.mark.parametrize("num_blocks", [10_000, 100_000, 1_000_000])
def test_reorder(
    benchmark: Any, repeat: int, num_blocks: int, order: str, rival: str, make_queue: MakeQueue
) -> None:
    """Canonical order from a shuffled queue of all blocks but block 0.

    For vLLM's class, which has no such call: clear the links and construct it anew from the blocks
    in id order, the least that restores its order.
    """
    from random import Random

    ids = list(range(num_blocks))
    Random(40244).shuffle(ids)
    queue = make_queue(ids)
    by_id = sorted(queue.get_all_free_blocks(), key=lambda block: int(block.block_id))
    made: list[Any] = [queue]

    def shuffle() -> tuple[tuple[()], dict[str, Any]]:
        made[0].append_n([by_id[i] for i in ids if made[0].remove(by_id[i]) is None])
        assert order_of(made[0]) == ids
        return (), {}

    def reorder_native() -> None:
        made[0].reorder()

    def rebuild_vllm() -> None:
        for block in by_id:
            block.prev_free_block = block.next_free_block = None
        made[0] = FreeKVCacheBlockQueue(by_id)

    assert isinstance(queue, FreeBlockQueue | FreeKVCacheBlockQueue)
    benchmark.pedantic(
        reorder_native if rival == "native" else rebuild_vllm, setup=shuffle, rounds=ROUNDS
    )
    name = "reorder, shuffled" if num_blocks == 100_000 else f"reorder {num_blocks:,}, shuffled"
    record(benchmark, name, rival, num_blocks, order_of(made[0]) == list(range(num_blocks)))
