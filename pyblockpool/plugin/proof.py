"""The proof: after the patches, a real pool of eight blocks hands out what vLLM's own would."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from pyblockpool.plugin.surface import BLOCK_POOL, vllm_version

NUM_BLOCKS = 8


def _pool() -> Any:
    pool_class = import_module(BLOCK_POOL).BlockPool
    arguments = {"num_gpu_blocks": NUM_BLOCKS, "enable_caching": True, "hash_block_size": 16}
    known = inspect.signature(pool_class.__init__).parameters
    return pool_class(**{name: value for name, value in arguments.items() if name in known})


def trace_of_a_pool(pool: Any = None) -> list[list[int]]:
    """Block ids that a pool hands out in a short life, and the order that is left in the end."""
    pool = pool or _pool()
    trace: list[list[int]] = [[pool.null_block.block_id]]

    def get(n: int) -> Any:
        blocks = pool.get_new_blocks(n)
        trace.append([block.block_id for block in blocks])
        return blocks

    first, second = get(3), get(2)
    pool.free_blocks(reversed(first))
    third = get(4)
    pool.free_blocks(third[:1])
    pool.free_blocks(second)
    pool.free_blocks(reversed(third[1:]))
    get(1)
    trace.append([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])
    return trace


def disproof(expected: list[list[int]], queue_class: type | None) -> str:
    """Why a new pool is not what it should be, as a sentence; "" if it is.

    Returns rather than raises, as a traceback would keep the pool of the proof alive and with it
    the native queue that stands in the way of taking the patches back.

    Args:
        expected: `trace_of_a_pool()` before the patches.
        queue_class: what the queue of a new pool has to be, None if it has to be vLLM's.
    """
    try:
        pool = _pool()
        queue = pool.free_block_queue
        if queue_class is not None and type(queue) is not queue_class:
            return (
                f"a new BlockPool of vLLM {vllm_version()} has a {type(queue).__qualname__} as "
                f"its queue although {queue_class.__qualname__} was put in its place"
            )
        trace = trace_of_a_pool(pool)
        broken = queue.check() if queue_class is not None else ""
    except Exception as error:
        return f"a new BlockPool of vLLM {vllm_version()} failed: {type(error).__name__}: {error}"
    if trace != expected or broken:
        return (
            f"a pool of {NUM_BLOCKS} blocks on vLLM {vllm_version()} handed out {trace} and not "
            f"{expected} as before{'; ' + broken if broken else ''}"
        )
    return ""
