"""The queues and pools that are compared, and the blocks that each of them gets.

A native queue serves the links of the class of its blocks, for good: over vLLM's own class it would
slow down the rival that follows in the same process. And Python fits its bytecode to the classes
that it meets: a pool whose code has met two queues is slower with both. So each rival but vLLM's
gets its module of vLLM once more, with the same code and classes of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from vllm.v1.core import block_pool, kv_cache_utils

from pyblockpool import FreeBlockQueue

NUM_BLOCKS = 100_000
BLOCK_SIZE = 16
# Who is compared -> the policy of its queue. The four are measured in this order.
POLICY = {"vllm": "lru", "native": "lru", "sorted": "sorted", "extent": "extent"}
BATCHES = [1, 16, 512, 4096]
# Blocks in an extent of each policy: 8 blocks of 16 tokens are the default of `extent`.
EXTENT = {"lru": 1, "sorted": 1, "extent": 8}


def once_more(module: ModuleType) -> Any:
    """A second copy of a module, which nobody else can import."""
    spec = find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


NativeBlock = once_more(kv_cache_utils).KVCacheBlock


def native(policy: str) -> Callable[[Sequence[Any]], Any]:
    return functools.partial(FreeBlockQueue, policy=policy, size=EXTENT[policy])


RIVALS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "vllm": kv_cache_utils.FreeKVCacheBlockQueue,
    **{rival: native(POLICY[rival]) for rival in ("native", "sorted", "extent")},
}
BLOCKS = {
    rival: kv_cache_utils.KVCacheBlock if rival == "vllm" else NativeBlock for rival in RIVALS
}


def pool_class(rival: str) -> Any:
    if rival == "vllm":
        return block_pool.BlockPool
    module = once_more(block_pool)
    module.KVCacheBlock = NativeBlock
    module.FreeKVCacheBlockQueue = RIVALS[rival]
    return module.BlockPool


POOLS = {rival: pool_class(rival) for rival in RIVALS}


@functools.lru_cache(maxsize=2)
def blocks_of(block_class: Any) -> list[Any]:
    """NUM_BLOCKS blocks, made in the order of ids as vLLM's pool makes them."""
    return [block_class(block_id) for block_id in range(NUM_BLOCKS)]


def make_queue(rival: str, ids: Sequence[int]) -> Any:
    """A queue of unhashed blocks, in the order of ``ids``; it takes them from the queue before."""
    by_id = blocks_of(BLOCKS[rival])
    return RIVALS[rival]([by_id[block_id] for block_id in ids])


def make_cached_queue(rival: str, ids: Sequence[int]) -> Any:
    """A queue of cached blocks, longest free first in the order of ``ids``."""
    queue = make_queue(rival, range(NUM_BLOCKS))
    queue.popleft_n(NUM_BLOCKS)
    by_id = blocks_of(BLOCKS[rival])
    queue.append_n([by_id[block_id] for block_id in ids])
    return queue
