"""The classes under test: every implementation of the queue, every kind of block.

One contract, many implementations: `queue_class` and `block_class` (conftest.py) run a test over
these tables, and the state machine drives them side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyblockpool import FreeBlockQueue, reference


@dataclass(slots=True)
class SlotBlock:
    """A block as vLLM 0.18 and later have it: slots, dataclass equality, unhashable."""

    block_id: int
    ref_cnt: int = 0
    prev_free_block: Any = None
    next_free_block: Any = None
    pool: Any = None


@dataclass
class DictBlock:
    """A block as vLLM before 0.18 has it: everything in ``__dict__``."""

    block_id: int
    ref_cnt: int = 0
    prev_free_block: Any = None
    next_free_block: Any = None
    pool: Any = None


MakeBlocks = Callable[[int], list[Any]]

QUEUES: dict[str, Any] = {"reference": reference.FreeBlockQueue, "native": FreeBlockQueue}
BLOCKS: dict[str, Any] = {"slots": SlotBlock, "dict": DictBlock}

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.core import kv_cache_utils
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("vllm"):
        raise
    HAS_VLLM = False
else:
    HAS_VLLM = True
    QUEUES["vllm"] = kv_cache_utils.FreeKVCacheBlockQueue
    BLOCKS["vllm"] = kv_cache_utils.KVCacheBlock


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def walk(queue: Any) -> list[int]:
    """Ids found by following the links from the fake head, each link checked from both sides."""
    found = []
    node = queue.fake_free_list_head
    while node.next_free_block is not queue.fake_free_list_tail:
        after = node.next_free_block
        assert after.prev_free_block is node
        found.append(after.block_id)
        node = after
    assert queue.fake_free_list_tail.prev_free_block is node
    return found


def assert_order(queue: Any, expected: list[int]) -> None:
    """Every way to read the order says `expected`, and the queue finds nothing broken."""
    assert ids(queue.get_all_free_blocks()) == expected
    assert walk(queue) == expected
    assert queue.num_free_blocks == len(expected)
    if hasattr(queue, "iter_blocks_after"):
        assert ids(queue.iter_blocks_after(None)) == expected
    if hasattr(queue, "check"):
        assert queue.check() == ""
