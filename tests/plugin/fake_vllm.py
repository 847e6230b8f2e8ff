"""A small host with the surface that the plugin needs of vLLM, to be bent by tests."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
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
        self.num_gpu_blocks = num_gpu_blocks
        self.blocks = [KVCacheBlock(i) for i in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()

    def get_new_blocks(self, num_blocks):
        return self.free_block_queue.popleft_n(num_blocks)

    def free_blocks(self, ordered_blocks):
        blocks = list(ordered_blocks)
        if hasattr(self.free_block_queue, "prepend_n"):
            self.free_block_queue.prepend_n([])
        self.free_block_queue.append_n(blocks)

    def touch(self, blocks): ...
    def evict_blocks(self, block_ids): ...
    def reset_prefix_cache(self):
        return self.get_num_free_blocks() == self.num_gpu_blocks - 1

    def get_num_free_blocks(self):
        return self.free_block_queue.num_free_blocks
"""

COORDINATOR = """
from types import SimpleNamespace
from vllm.v1.core.block_pool import BlockPool

class KVCacheCoordinator:
    def __init__(self, kv_cache_config):
        self.block_pool = BlockPool(kv_cache_config.num_blocks, True, 16)
        self.single_type_managers = (SimpleNamespace(block_pool=self.block_pool),) * 2

    def reset_prefix_cache(self):
        return self.block_pool.reset_prefix_cache()
"""

KV_CACHE_MANAGER = """
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

class KVCacheManager:
    def __init__(self, kv_cache_config):
        self.coordinator = KVCacheCoordinator(kv_cache_config)

    def get_computed_blocks(self, request):
        return [], 0

    def free(self, request): ...

    def reset_prefix_cache(self):
        return self.coordinator.reset_prefix_cache()
"""

MANAGERS = """
class SingleTypeKVCacheManager:
    def __init__(self, block_pool):
        self.block_pool = block_pool
        self.block_size = 1
        self.req_to_blocks = {}

    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        table = self.req_to_blocks.setdefault(request_id, [])
        blocks = self.block_pool.get_new_blocks(-(-num_tokens // self.block_size) - len(table))
        table.extend(blocks)
        for block in blocks:
            block.ref_cnt += 1
        return blocks

    def allocate_external_computed_blocks(self, request_id, local, external):
        self.allocate_new_blocks(request_id, local + external, local + external)

class SlidingWindowManager(SingleTypeKVCacheManager):
    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
"""

SCHEDULER_INTERFACE = """
class SchedulerInterface:
    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False): ...
"""

SCHEDULER = """
from types import SimpleNamespace
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.interface import SchedulerInterface

class Scheduler(SchedulerInterface):
    def __init__(self, vllm_config):  # no more than the number of blocks
        self.kv_cache_manager = KVCacheManager(
            SimpleNamespace(num_blocks=vllm_config, kv_cache_groups=[])
        )
        self.resets = []
        self.step = lambda: None

    def update_from_output(self, scheduler_output, model_runner_output): ...

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.step()
        self.resets.append((reset_running_requests, reset_connector))
        return self.kv_cache_manager.reset_prefix_cache()
"""

CORE = """
class EngineCore:
    def __init__(self, scheduler):
        self.scheduler = scheduler

    def shutdown(self): ...

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
"""

CORE_CLIENT = """
import asyncio
import inspect
from types import SimpleNamespace

class EngineCoreClient:
    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False): ...

class InprocClient(EngineCoreClient):
    def __init__(self, core):
        self.engine_core = core
        self.step = lambda: None

    def get_output(self):
        return self.step()

    def abort_requests(self, request_ids):
        return self.step()

    def sleep(self, level=1):
        return self.step()

    def release_kv_cache_memory(self):
        return self.step()

    def shutdown(self): ...

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self.engine_core.reset_prefix_cache(reset_running_requests, reset_connector)

def utility(client, core, method, args):
    client.sent.append((method, *args))
    try:
        called = getattr(core, method)
        assert len(args) <= len(inspect.signature(called).parameters)
        return called(*args)
    except Exception as error:
        raise Exception(f"Call to {method} method failed: {error}") from None

class SyncMPClient(EngineCoreClient):
    def __init__(self, core):
        self.core = core
        self.sent = []
        self.resources = SimpleNamespace(engine_dead=False)

    def call_utility(self, method, *args):
        return utility(self, self.core, method, args)

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self.call_utility("reset_prefix_cache", reset_running_requests, reset_connector)

class AsyncMPClient(EngineCoreClient):
    def __init__(self, *cores):
        self.core_engines = cores
        self.sent = []
        self.resources = SimpleNamespace(engine_dead=False, output_queue_task=None)

    async def _call_utility_async(self, method, *args, engine):
        await asyncio.sleep(0)
        return utility(self, engine, method, args)

    async def reset_prefix_cache_async(self, reset_running_requests=False, reset_connector=False):
        engine = self.core_engines[0]
        args = (reset_running_requests, reset_connector)
        return await self._call_utility_async("reset_prefix_cache", *args, engine=engine)
"""

REQUEST = """
class Request:
    num_output_tokens = 0

class RequestStatus:
    RUNNING, WAITING_FOR_REMOTE_KVS = range(2)

    def is_finished(status): ...
    def get_finished_reason(status): ...
"""

EXCEPTIONS = """
class EngineDeadError(Exception): ...
"""

LLM_ENGINE = """
class LLMEngine:
    def __init__(self, client):
        self.engine_core = client

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self.engine_core.reset_prefix_cache(reset_running_requests, reset_connector)
"""

ASYNC_LLM = """
class AsyncLLM:
    def __init__(self, client):
        self.engine_core = client

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        args = (reset_running_requests, reset_connector)
        return await self.engine_core.reset_prefix_cache_async(*args)
"""

LLM = """
class LLM:
    def __init__(self, engine):
        self.llm_engine = engine

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

# the end of all modules
"""

# In the order of their imports.
SOURCES = {
    "vllm.v1.request": REQUEST,
    "vllm.v1.core.kv_cache_utils": KV_CACHE_UTILS,
    "vllm.v1.core.block_pool": BLOCK_POOL,
    "vllm.v1.core.kv_cache_coordinator": COORDINATOR,
    "vllm.v1.core.kv_cache_manager": KV_CACHE_MANAGER,
    "vllm.v1.core.single_type_kv_cache_manager": MANAGERS,
    "vllm.v1.core.sched.interface": SCHEDULER_INTERFACE,
    "vllm.v1.core.sched.scheduler": SCHEDULER,
    "vllm.v1.engine.core": CORE,
    "vllm.v1.engine.core_client": CORE_CLIENT,
    "vllm.v1.engine.exceptions": EXCEPTIONS,
    "vllm.v1.engine.llm_engine": LLM_ENGINE,
    "vllm.v1.engine.async_llm": ASYNC_LLM,
    "vllm.entrypoints.llm": LLM,
}


def config(num_blocks: int, *block_sizes: int) -> Any:
    """A KVCacheConfig with a group for each block size."""
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=n)) for n in block_sizes]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups)


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
        for package in ("vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.engine"):
            self._module(package, "")
        self._module("vllm.entrypoints", "")
        self.load()

    def load(self, *edits: tuple[str, str]) -> None:
        """(Re)load all modules but the first three with pieces of their text replaced."""
        sources = dict(SOURCES)
        for old, new in edits:
            assert any(old in source for source in sources.values()), old
            sources = {name: source.replace(old, new) for name, source in sources.items()}
        self.modules = {name: self._module(name, source) for name, source in sources.items()}
        self.kv_cache_utils = self.modules["vllm.v1.core.kv_cache_utils"]
        self.block_pool = self.modules["vllm.v1.core.block_pool"]

    def make(self, name: str, *arguments: Any) -> Any:
        """A new instance of the class of this name."""
        (cls,) = {vars(module)[name] for module in self.modules.values() if name in vars(module)}
        return cls(*arguments)

    def snapshot(self) -> dict[str, Any]:
        """Everything that a patch could change, by name."""
        state: dict[str, Any] = {"variables": dict(self.envs.environment_variables)}
        for module in self.modules.values():
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
