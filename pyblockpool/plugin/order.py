"""The order of the free blocks of vLLM's pools: put it back, and tell what it is like."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from typing import Any

from pyblockpool.plugin.surface import KV_CACHE_UTILS, name_of


def blocks_in_use(pool: Any) -> int:
    """How many blocks of a pool somebody holds a reference to.

    Not every block that is out of the queue: the null block, sink blocks (vLLM 0.14 to 0.29) and
    whatever else was taken out for good have no reference.
    """
    # Usually nothing is missing, and a million blocks need not be looked at. Who sets the count
    # from outside is believed.
    if pool.get_num_free_blocks() == pool.num_gpu_blocks - 1:
        return 0
    return sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)


def reset_order(pools: Iterable[Any]) -> int:
    """Put the free blocks of all pools in order, or of none while one has a block in use.

    Returns:
        The number of blocks in use: 0 if it was done.
    """
    pools = list(pools)
    in_use = sum(map(blocks_in_use, pools))
    if not in_use:
        for pool in pools:
            _put_in_order(pool)
    return in_use


def _put_in_order(pool: Any) -> None:
    """Canonical order, of the blocks that are in the queue: who was taken out of it stays out.

    Blocks that were unpinned (vLLM 0.30 and later) count as free but are still read: they stay the
    last resort, in the order that they have.
    """
    queue = pool.free_block_queue
    watched = getattr(pool, "_reuse_watchers", None) or ()
    last = [b for b in queue.get_all_free_blocks() if b.block_id in watched] if watched else []
    order_by_id(queue)
    for block in last:
        queue.remove(block)
        queue.append(block)


def order_by_id(queue: Any) -> None:
    """Ascending block ids, in a native queue or in any other that has vLLM's methods."""
    if is_native(queue):
        queue.reorder()
        return
    blocks = sorted(queue.get_all_free_blocks(), key=attrgetter("block_id"))
    count = queue.num_free_blocks
    queue.num_free_blocks = len(blocks)  # somebody may have set it to something else
    try:
        queue.popleft_n(len(blocks))
        queue.append_n(blocks)
    finally:
        queue.num_free_blocks = count


def pool_stats(pool: Any) -> dict[str, Any]:
    """Figures of the free blocks of one pool, as `reset.DOCS` explains them; walks all of them."""
    free = pool.free_block_queue.get_all_free_blocks()
    breaks = [at for at, (a, b) in enumerate(pairwise(free), 1) if b.block_id != a.block_id + 1]
    edges = [0, *breaks, len(free)] if free else [0]
    return {
        **queue_stats(pool.free_block_queue),
        "num_blocks": pool.num_gpu_blocks,
        "in_use": blocks_in_use(pool),
        "free": len(free),
        "unhashed": sum(block.block_hash is None for block in free),
        "runs": len(edges) - 1,
        "longest_run": max((end - start for start, end in pairwise(edges)), default=0),
    }


def queue_stats(queue: Any) -> dict[str, Any]:
    """What a queue is and does: the part of `pool_stats` that looks at no block."""
    if not is_native(queue):
        own_class = import_module(KV_CACHE_UTILS).FreeKVCacheBlockQueue
        implementation = "vllm" if type(queue) is own_class else name_of(type(queue))
        return {"implementation": implementation, "policy": "lru"}
    stats = queue.stats()
    told = ("policy", "size", "pack_tails", "clean", "aged", "early_evictions", "shortages")
    return {"implementation": "native", **{name: stats[name] for name in told if name in stats}}


def is_native(queue: Any) -> bool:
    # Under VLLM_BLOCK_QUEUE=python the compiled module is not needed, and so not imported.
    compiled = sys.modules.get("pyblockpool._queue")
    return compiled is not None and isinstance(queue, compiled.FreeBlockQueue)
