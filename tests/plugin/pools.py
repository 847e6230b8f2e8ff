"""Real vLLM block pools for tests, in the shorthand of public bug reports."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

from implementations import HAS_VLLM

from pyblockpool.plugin.placement import QueueMaker

BLOCK_SIZE = 16


def pool(num_blocks: int, caching: bool, pool_class: Any = None) -> Any:
    """As a KVCacheManager builds it; ``num_blocks`` counts the null block."""
    from vllm.v1.core import block_pool

    maker = block_pool.FreeKVCacheBlockQueue
    with (
        maker.building([BLOCK_SIZE]) if isinstance(maker, QueueMaker) else contextlib.nullcontext()
    ):
        return (pool_class or block_pool.BlockPool)(num_blocks, caching, BLOCK_SIZE)


def free(pool: Any, blocks: Iterable[Any]) -> None:
    """As a request frees its chain: the tail first."""
    pool.free_blocks(list(reversed(list(blocks))))


def touch(pool: Any, blocks: list[Any]) -> None:
    """A prefix hit on these blocks. vLLM 0.13 takes a list of blocks for each KV-cache group."""
    annotation = str(inspect.signature(pool.touch).parameters["blocks"].annotation)
    pool.touch((blocks,) if "tuple" in annotation else blocks)


def give_hash(pool: Any, block: Any, value: int | None = None) -> None:
    """Give a block a prefix-cache hash, its id by default, and enter it in the hash map."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    number = block.block_id if value is None else value
    key = make_block_hash_with_group_id(BlockHash(number.to_bytes(32, "big")), 0)
    if hasattr(block, "set_block_hash"):
        block.set_block_hash(key, BLOCK_SIZE)
    else:
        block.block_hash = key
    pool.cached_block_hash_to_block.insert(key, block)


def order(pool: Any) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def splits_by_hash() -> bool:
    """Whether `free_blocks` of the installed vLLM puts unhashed blocks first (0.24 and later)."""
    if not HAS_VLLM:
        return False
    from vllm.v1.core.block_pool import BlockPool

    release = inspect.unwrap(BlockPool.free_blocks)
    by_caller = "prepend" in inspect.signature(release).parameters  # in 0.23
    return "prepend_n" in release.__code__.co_names and not by_caller


def appends_without_caching() -> bool:
    """Whether `free_blocks` puts all blocks last where the prefix cache is off: vLLM before 0.24,
    and 0.27."""
    import vllm

    return not splits_by_hash() or vllm.__version__.startswith("0.27.")
