"""The queues that are compared, and the blocks that each of them gets."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from pyblockpool import FreeBlockQueue

NUM_BLOCKS = 100_000
RIVALS = {"vllm": FreeKVCacheBlockQueue, "native": FreeBlockQueue}
# A native queue serves the links of the class of its blocks, for good: over vLLM's own class it
# would slow down the rival that follows in the same process. So the native queue gets blocks of a
# class made of the same fields.
BLOCKS = {
    "vllm": KVCacheBlock,
    "native": make_dataclass(
        "NativeKVCacheBlock",
        [
            (f.name, f.type, field(default=f.default, compare=f.compare, kw_only=f.kw_only))
            for f in fields(KVCacheBlock)
        ],
        slots=True,
    ),
}
