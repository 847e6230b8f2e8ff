"""The proof: after the patches, a real pool of eight blocks hands out what vLLM's own would, and
its order can be reset.
"""

from __future__ import annotations

import contextlib
import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from pyblockpool import reference
from pyblockpool.plugin.placement import QueueMaker
from pyblockpool.plugin.surface import BLOCK_POOL, KV_CACHE_UTILS, vllm_version
from pyblockpool.settings import Settings

NUM_BLOCKS = 8


def _pool() -> Any:
    """As a KVCacheManager builds it."""
    module: Any = import_module(BLOCK_POOL)
    arguments = {"num_gpu_blocks": NUM_BLOCKS, "enable_caching": True, "hash_block_size": 16}
    known = inspect.signature(module.BlockPool.__init__).parameters
    maker = module.FreeKVCacheBlockQueue
    as_cache = maker.building([16]) if isinstance(maker, QueueMaker) else None
    with as_cache or contextlib.nullcontext():
        return module.BlockPool(**{name: arguments[name] for name in arguments if name in known})


def expected_trace(settings: Settings) -> list[list[int]]:
    """What a pool has to do: what one of vLLM's own does, or one on the specification of a policy.

    Taken before the patches.
    """
    if settings.policy == "lru":
        return trace_of_a_pool(_pool())
    module: Any = import_module(BLOCK_POOL)
    original = module.FreeKVCacheBlockQueue
    module.FreeKVCacheBlockQueue = QueueMaker(settings, reference.FreeBlockQueue)
    try:
        return trace_of_a_pool(_pool())
    finally:
        module.FreeKVCacheBlockQueue = original


def trace_of_a_pool(pool: Any) -> list[list[int]]:
    """Block ids in a short life of a pool: what it hands out, and its order after each step."""
    queue = pool.free_block_queue
    trace: list[list[int]] = [[pool.null_block.block_id]]

    def get(n: int) -> Any:
        blocks = pool.get_new_blocks(n)
        trace.append([block.block_id for block in blocks])
        return blocks

    def look() -> None:
        trace.append([block.block_id for block in queue.get_all_free_blocks()])

    first, second = get(3), get(2)
    pool.free_blocks(reversed(first))
    third = get(4)
    pool.free_blocks(third[:1])
    pool.free_blocks(second)
    pool.free_blocks(reversed(third[1:]))
    look()
    # Of the methods of the queue, a pool without hashes calls some, which depends on its release.
    taken = [queue.popleft(), *queue.popleft_n(2)]
    queue.append_n(taken[:2])
    queue.append(taken[2])
    look()
    queue.remove(taken[1])
    look()
    # Ours has the methods of the newest release: what the installed one has counts.
    theirs = import_module(KV_CACHE_UTILS).FreeKVCacheBlockQueue
    if hasattr(theirs, "prepend_n"):
        queue.prepend_n([taken[1]])
    else:
        queue.append_n([taken[1]])
    if hasattr(theirs, "iter_blocks_after"):
        trace.append([block.block_id for block in queue.iter_blocks_after(taken[0])])
    look()
    pool.free_blocks(get(1))
    look()
    return trace


def counterexample(settings: Settings, expected: list[list[int]]) -> str:
    """Why a new pool is not what it should be, as a sentence; "" if it is.

    Returns rather than raises, as a traceback would keep the pool of the proof alive and with it
    the native queue that stands in the way of taking the patches back.

    Args:
        settings: what was asked for.
        expected: `expected_trace()`.
    """
    native = settings.queue == "native"
    try:
        pool = _pool()
        queue: Any = pool.free_block_queue
        if native:
            from pyblockpool import FreeBlockQueue

            if type(queue) is not FreeBlockQueue:
                return (
                    f"a new BlockPool of vLLM {vllm_version()} has a {type(queue).__qualname__} as "
                    "its queue although FreeBlockQueue was put in its place"
                )
        trace = trace_of_a_pool(pool)
        done = pool.reset_free_block_queue_order()
        order = [block.block_id for block in queue.get_all_free_blocks()]
        broken = queue.check() if native else ""
    except Exception as error:
        return f"a new BlockPool of vLLM {vllm_version()} failed: {type(error).__name__}: {error}"
    if trace != expected or broken:
        return (
            f"a pool of {NUM_BLOCKS} blocks on vLLM {vllm_version()} handed out {trace} and not "
            f"{expected} as before{'; ' + broken if broken else ''}"
        )
    if not done or order != _canonical_order(settings):
        return (
            f"a reset of the order of a pool of {NUM_BLOCKS} blocks on vLLM {vllm_version()} "
            f"returned {done} and left the order {order}"
        )
    return ""


def _canonical_order(settings: Settings) -> list[int]:
    """Of all blocks but the null block: ascending, but under ``extent`` whole extents go first."""
    blocks = [
        SimpleNamespace(block_id=block_id, prev_free_block=None, next_free_block=None)
        for block_id in range(1, NUM_BLOCKS)
    ]
    maker = QueueMaker(settings, reference.FreeBlockQueue)
    with maker.building([16]):
        queue = maker(blocks)
    return [block.block_id for block in queue.get_all_free_blocks()]
