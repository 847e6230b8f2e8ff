"""What the placement policies need of vLLM beside the queue itself.

- the size of an extent: 128 tokens, whatever block size the engine has resolved;
- where a request grows: the block behind which its next ones are wanted.

That all hashes are gone, `reset.py` tells the queue.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyblockpool.settings import Settings

Method = Callable[..., Any]

# The largest KV tile of the attention kernels that tile the physical cache (FlexAttention's).
TILE_TOKENS = 128


class QueueMaker:
    """Stands where vLLM looks up the class of its queue: ``maker(blocks)`` is a native queue.

    Extents are for the cache that attention kernels read, the pool of a KVCacheManager. Other pools
    (of offloaded blocks in host memory, say) are filled in small pieces without a hint, and nobody
    reads them in tiles: there an extent is one block, which evicts what LRU evicts.

    Args:
        settings: policy and size of the queues.
        queue_class: `pyblockpool.FreeBlockQueue`, or its specification.
    """

    def __init__(self, settings: Settings, queue_class: Any) -> None:
        self._settings = settings
        self._queue_class = queue_class
        self._size = 1

    def __call__(self, blocks: Any) -> Any:
        return self._queue_class(
            blocks,
            policy=self._settings.policy,
            size=self._size,
            pack_tails=self._settings.pack_tails,
        )

    def __repr__(self) -> str:
        return f"<maker of queues for {self._settings}>"

    @contextlib.contextmanager
    def building(self, block_sizes: Sequence[int]) -> Iterator[None]:
        """The pool of a KVCacheManager is built in here.

        Args:
            block_sizes: tokens in a block of each KV-cache group. They share one pool: the smallest
                block needs the largest extent, and that holds whole tiles of the others, too.
        """
        before = self._size
        # Blocks that hold a tile, rounded down to a power of two; 1 if a block is larger. A model
        # without KV cache has a pool, but no groups.
        blocks = max(1, TILE_TOKENS // min(block_sizes, default=TILE_TOKENS))
        self._size = self._settings.size or 1 << (blocks.bit_length() - 1)
        try:
            yield
        finally:
            self._size = before

    def while_building(self, original: Method) -> Method:
        """Wraps the constructor of vLLM's KVCacheManager."""

        @functools.wraps(original)
        def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
            config = kwargs["kv_cache_config"] if "kv_cache_config" in kwargs else args[0]
            groups = config.kv_cache_groups
            with self.building([group.kv_cache_spec.block_size for group in groups]):
                original(manager, *args, **kwargs)

        return __init__


def grow_in_place(original: Method) -> Method:
    """Wraps a method ``(self, request_id, ...)`` of vLLM's managers that allocates blocks."""
    from pyblockpool import FreeBlockQueue

    @functools.wraps(original)
    def allocate(self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        table = self.req_to_blocks.get(request_id)
        queue = self.block_pool.free_block_queue
        if not table or (last := table[-1]).is_null or not isinstance(queue, FreeBlockQueue):
            return original(self, request_id, *args, **kwargs)
        try:
            queue.grow_after(last)
        except RuntimeError:  # of another pool, or given up already
            return original(self, request_id, *args, **kwargs)
        try:
            return original(self, request_id, *args, **kwargs)
        finally:
            queue.grow_after(None)

    return allocate


def grow_in_place_when_full(original: Method) -> Method:
    """The same for ``(self, request_id, num_tokens, ...)``: the blocks for so many tokens in all.

    vLLM calls it for each running request in each step, and mostly the last block has room.
    """
    growing = grow_in_place(original)

    @functools.wraps(original)
    def allocate(self: Any, request_id: str, num_tokens: int, num_tokens_main_model: int) -> Any:
        table = self.req_to_blocks.get(request_id)
        if table and num_tokens > len(table) * self.block_size:
            return growing(self, request_id, num_tokens, num_tokens_main_model)
        return original(self, request_id, num_tokens, num_tokens_main_model)

    return allocate
