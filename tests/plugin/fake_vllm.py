"""A host of forty lines with the surface that the plugin needs of vLLM, to be bent by tests."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest

KV_CACHE_UTILS = """
from dataclasses import dataclass

@dataclass(slots=True)
class KVCacheBlock:
    block_id: int
    ref_cnt: int = 0
    block_hash: object = None
    prev_free_block: object = None
    next_free_block: object = None
    is_null: bool = False

class FreeKVCacheBlockQueue:
    def __init__(self, blocks):
        self.num_free_blocks = len(blocks)
        self.fake_free_list_head = list(blocks)
        self.fake_free_list_tail = None

    def popleft(self):
        return self.popleft_n(1)[0]

    def popleft_n(self, n):
        taken = self.fake_free_list_head[:n]
        del self.fake_free_list_head[:n]
        self.num_free_blocks -= n
        return taken

    def remove(self, block):
        self.fake_free_list_head.remove(block)
        self.num_free_blocks -= 1

    def append(self, block):
        self.append_n([block])

    def append_n(self, blocks):
        self.fake_free_list_head += blocks
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self):
        return list(self.fake_free_list_head)
"""

BLOCK_POOL = """
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

class BlockPool:
    def __init__(self, num_gpu_blocks, enable_caching, hash_block_size):
        self.blocks = [KVCacheBlock(i) for i in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()

    def get_new_blocks(self, num_blocks):
        return self.free_block_queue.popleft_n(num_blocks)

    def free_blocks(self, ordered_blocks):
        self.free_block_queue.append_n(list(ordered_blocks))

    def touch(self, blocks): ...
    def evict_blocks(self, block_ids): ...
    def reset_prefix_cache(self): ...
    def get_num_free_blocks(self):
        return self.free_block_queue.num_free_blocks
"""

COORDINATOR = "from vllm.v1.core.block_pool import BlockPool\n"


class FakeVLLM:
    """The fake modules, in ``sys.modules`` for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        self.vllm = self._module("vllm", "__version__ = '0.99.0'")
        self.envs = self._module("vllm.envs", "environment_variables = {}")
        logger = self._module("vllm.logger", "")
        logger.init_logger = logging.getLogger
        self._module("vllm.v1", "")
        self._module("vllm.v1.core", "")
        self.load()

    def load(self, *edits: tuple[str, str]) -> None:
        """(Re)load the modules of the core with pieces of their text replaced."""
        sources = [KV_CACHE_UTILS, BLOCK_POOL, COORDINATOR]
        for old, new in edits:
            assert any(old in source for source in sources), old
            sources = [source.replace(old, new) for source in sources]
        self.kv_cache_utils = self._module("vllm.v1.core.kv_cache_utils", sources[0])
        self.block_pool = self._module("vllm.v1.core.block_pool", sources[1])
        self.coordinator = self._module("vllm.v1.core.kv_cache_coordinator", sources[2])

    def snapshot(self) -> dict[str, Any]:
        """Everything that a patch could change, by name."""
        state: dict[str, Any] = {"variables": dict(self.envs.environment_variables)}
        for module in (self.kv_cache_utils, self.block_pool, self.coordinator):
            for name, value in vars(module).items():
                if name.startswith("__"):
                    continue
                state[f"{module.__name__}.{name}"] = value
                if isinstance(value, type):
                    state.update({f"{name}.{key}": v for key, v in vars(value).items()})
        return state

    def _module(self, name: str, source: str) -> Any:
        module = ModuleType(name)
        self._monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, f"<{name}>", "exec"), vars(module))
        return module
