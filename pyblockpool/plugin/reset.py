"""The order reset through every layer of the engine (RFC vllm-project/vllm#40244).

The way of a call, from class to class of vLLM:

    LLM -> LLMEngine -> InprocClient, SyncMPClient -> EngineCore -> scheduler -> KVCacheManager
    AsyncLLM ---------> AsyncMPClient ------------->             -> KVCacheCoordinator -> BlockPool

``DOCS`` says what the calls do, ``LAYERS`` at the end who gains what. Each function states its
parameters, as vLLM sends arguments to an engine core by position and counts them.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyblockpool.plugin import surface
from pyblockpool.plugin.clients import (
    Method,
    ask_async_client,
    ask_client,
    ask_core,
    ask_core_process,
    ask_core_processes,
    ask_llm_engine,
    end_turns,
    in_turn,
)
from pyblockpool.plugin.order import is_native, pool_stats, reset_order
from pyblockpool.plugin.surface import RESET_ORDER, RESET_PREFIX_CACHE, STATS, name_of

# The docstrings that users of vLLM's classes see.
DOCS = {
    RESET_ORDER: """Hand out free KV-cache blocks in canonical order from here on.

That is ascending block ids; under policy extent whole extents first, ascending, then the rest.

For the time between two rounds, when no request runs. Nothing is preempted; prefix-cache hashes,
reference counts, KV events and metrics stay. Blocks with a hash that are still in the cache lose
their place in the order of eviction: call it after `reset_prefix_cache()`, or use
``reset_prefix_cache(reorder_free_queue=True)``.

Returns:
    True if it was done, in every engine. False, with a warning and with that engine unchanged,
    while a request, a KV connector or anybody else holds a block: try again when they are done.

Raises:
    InactiveError: pyblockpool is not active where the engine runs.
    NotImplementedError: a client, a scheduler or a pool of somebody else that pyblockpool does not
        know (from another process it arrives as vLLM's Exception).
    RuntimeError: a step of the engine runs in this process, or the engine belongs to another event
        loop, or, in one process, it has been shut down.
    EngineDeadError: it has been shut down, or has died, also during the call.
""",
    STATS: """Figures of the free KV-cache blocks, from inside the engine. O(blocks).

Returns:
    A dict; from several data-parallel engines a list of them, by rank. ``pid``: of the engine
    core. ``implementation``: of the queue, "native", "vllm" or the name of a class. ``policy``.
    ``num_blocks``: in the pool, the null block included. ``in_use``: blocks with references.
    ``free``: blocks queued. ``unhashed``: free blocks without a prefix-cache hash. ``runs``:
    stretches of the queue, in its order, in which each id is the one before it plus 1.
    ``longest_run``: blocks in the longest of them. ``other_pools``: the same of further pools.
    Under the policies sorted and extent also ``size``: blocks in an extent. ``pack_tails``: whether
    tables share their last extents. ``clean``, ``aged``: extents that are free as a whole, without
    and with cached blocks. ``early_evictions``: cached blocks that were given up out of turn, for
    the sake of their extent. ``shortages``: calls that found too few whole extents.

Raises:
    As `reset_free_block_queue_order()`.
""",
    RESET_PREFIX_CACHE: """pyblockpool adds ``reorder_free_queue``: if True,
`reset_free_block_queue_order()` follows a reset that succeeded, with nothing in between, and the
answer is True if both did.
""",
}


@dataclass(frozen=True)
class Layer:
    """What one class of vLLM gains.

    Attributes:
        module: where the class is.
        cls: its name.
        adds: new methods.
        wraps: methods that replace those of vLLM, made from them. One that the class does not
            define in this release is left out.
    """

    module: str
    cls: str
    adds: Mapping[str, Method] = field(default_factory=dict)
    wraps: Mapping[str, Callable[[Method], Method]] = field(default_factory=dict)


# Inside the engine core.


def _reset_order_of(pools: list[Any]) -> bool:
    if in_use := reset_order(pools):
        surface.log().warning(
            "Failed to reset the order of the free block queue because some blocks (%d) are not "
            "freed yet",
            in_use,
        )
    return not in_use


def _pools_of(coordinator: Any) -> list[Any]:
    """Each distinct pool once, that of the GPU first. One without a queue has no order."""
    managers = coordinator.single_type_managers
    pools = [coordinator.block_pool, *(manager.block_pool for manager in managers)]
    queued = {id(pool): pool for pool in pools if hasattr(pool, "free_block_queue")}
    if not queued:
        raise NotImplementedError(
            f"{name_of(type(pools[0]))} keeps its free blocks in no queue that pyblockpool knows"
        )
    return list(queued.values())


def _stats_of(pools: list[Any]) -> dict[str, Any]:
    """`pool_stats` of the first with ``other_pools``."""
    first, *others = map(pool_stats, pools)
    return first | {"other_pools": others}


def _kv_cache_manager(scheduler: Any) -> Any:
    manager = getattr(scheduler, "kv_cache_manager", None)
    if not hasattr(manager, RESET_ORDER):
        raise NotImplementedError(
            f"the scheduler {name_of(type(scheduler))} has no KVCacheManager of vLLM through which "
            f"pyblockpool could reach its free blocks: give it a {RESET_ORDER}() and a {STATS}() "
            "of its own"
        )
    return manager


def _reset_order_of_scheduler(self: Any) -> bool:
    if not _kv_cache_manager(self).reset_free_block_queue_order():
        return False
    for offload in _offloads(getattr(self, "connector", None)):
        # Lazy CPU offload walks the queue with a cursor, which means nothing in another order.
        if hasattr(offload, "_cursor"):
            offload._cursor = None
    surface.log().info("Reset the order of the free block queue")
    return True


def _offloads(connector: Any) -> Iterator[Any]:
    """The scheduler's side of a connector and of those that it consists of."""
    yield getattr(connector, "scheduler_manager", None)
    for part in getattr(connector, "_connectors", None) or ():
        yield from _offloads(part)


def _stats_of_scheduler(self: Any) -> dict[str, Any]:
    return dict(_kv_cache_manager(self).free_block_queue_stats())


def _reset_order_of_core(self: Any) -> bool:
    # A scheduler need not derive from vLLM's interface, which has the method.
    own = getattr(self.scheduler, RESET_ORDER, None)
    return bool(own() if own else _reset_order_of_scheduler(self.scheduler))


def _stats_of_core(self: Any) -> dict[str, Any]:
    own = getattr(self.scheduler, STATS, None)
    return {"pid": os.getpid()} | (own() if own else _stats_of_scheduler(self.scheduler))


def _then_reorder_pool(original: Method) -> Method:
    """For the pool, whose queue reads no hashes: it is told when all of them are gone."""

    def reset_prefix_cache(self: Any, reorder_free_queue: bool = False) -> bool:
        done: bool = original(self)
        if done and is_native(self.free_block_queue):
            self.free_block_queue.forget_hashes()
        return done and self.reset_free_block_queue_order() if reorder_free_queue else done

    return reset_prefix_cache


def _then_reorder_pools(original: Method) -> Method:
    """For the layers above it whose reset takes no arguments."""

    def reset_prefix_cache(self: Any, reorder_free_queue: bool = False) -> bool:
        done: bool = original(self)
        return done and self.reset_free_block_queue_order() if reorder_free_queue else done

    return reset_prefix_cache


def _then_reorder(original: Method) -> Method:
    """For the others in the engine core.

    They ask what is below them twice, so that somebody else's scheduler need not know the new
    argument.
    """

    def reset_prefix_cache(
        self: Any,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        reorder_free_queue: bool = False,
    ) -> bool:
        done: bool = original(self, reset_running_requests, reset_connector)
        return done and self.reset_free_block_queue_order() if reorder_free_queue else done

    return reset_prefix_cache


# From a front end to the engine core.


def _asks(
    module: str,
    cls: str,
    ask: Method,
    guard: Callable[[Method], Method] = lambda method: method,
    more: Mapping[str, Callable[[Method], Method]] | None = None,
) -> Layer:
    def reset_free_block_queue_order(self: Any) -> bool:
        return bool(ask(self, RESET_ORDER))

    def free_block_queue_stats(self: Any) -> dict[str, Any]:
        return dict(ask(self, STATS))

    def wrap(original: Method) -> Method:
        original = guard(original)

        def reset_prefix_cache(
            self: Any,
            reset_running_requests: bool = False,
            reset_connector: bool = False,
            reorder_free_queue: bool = False,
        ) -> bool:
            # The third argument is sent only when it means something: an engine core without the
            # plugin understands all other calls.
            if not reorder_free_queue:
                done: bool = original(self, reset_running_requests, reset_connector)
                return done
            third = (reset_running_requests, reset_connector, True)
            return bool(ask(self, RESET_PREFIX_CACHE, *third))

        return reset_prefix_cache

    return Layer(
        module,
        cls,
        adds={RESET_ORDER: reset_free_block_queue_order, STATS: free_block_queue_stats},
        wraps={RESET_PREFIX_CACHE: wrap, **(more or {})},
    )


def _asks_async(
    module: str, cls: str, ask: Callable[..., Awaitable[Any]], suffix: str = ""
) -> Layer:
    async def reset_free_block_queue_order(self: Any) -> bool:
        return bool(await ask(self, RESET_ORDER))

    async def free_block_queue_stats(self: Any) -> dict[str, Any] | list[dict[str, Any]]:
        stats: dict[str, Any] | list[dict[str, Any]] = await ask(self, STATS)
        return stats

    def wrap(original: Method) -> Method:
        async def reset_prefix_cache(
            self: Any,
            reset_running_requests: bool = False,
            reset_connector: bool = False,
            reorder_free_queue: bool = False,
        ) -> bool:
            if not reorder_free_queue:
                done: bool = await original(self, reset_running_requests, reset_connector)
                return done
            third = (reset_running_requests, reset_connector, True)
            return bool(await ask(self, RESET_PREFIX_CACHE, *third))

        return reset_prefix_cache

    return Layer(
        module,
        cls,
        adds={
            RESET_ORDER + suffix: reset_free_block_queue_order,
            STATS + suffix: free_block_queue_stats,
        },
        wraps={RESET_PREFIX_CACHE + suffix: wrap},
    )


def _refuse() -> Method:
    def call(self: Any) -> Any:
        raise NotImplementedError(
            f"the client {name_of(type(self))} does not pass this call on to its engine core"
        )

    return call


def _refuse_async() -> Method:
    async def call(self: Any) -> Any:
        _refuse()(self)

    return call


LAYERS = (
    Layer(
        surface.BLOCK_POOL,
        "BlockPool",
        adds={
            RESET_ORDER: lambda self: _reset_order_of([self]),
            STATS: lambda self: _stats_of([self]),
        },
        wraps={RESET_PREFIX_CACHE: _then_reorder_pool},
    ),
    Layer(
        surface.COORDINATOR,
        "KVCacheCoordinator",
        adds={
            RESET_ORDER: lambda self: _reset_order_of(_pools_of(self)),
            STATS: lambda self: _stats_of(_pools_of(self)),
        },
        wraps={RESET_PREFIX_CACHE: _then_reorder_pools},
    ),
    Layer(
        surface.KV_CACHE_MANAGER,
        "KVCacheManager",
        adds={
            RESET_ORDER: lambda self: _reset_order_of(_pools_of(self.coordinator)),
            STATS: lambda self: _stats_of(_pools_of(self.coordinator)),
        },
        wraps={RESET_PREFIX_CACHE: _then_reorder_pools},
    ),
    Layer(
        surface.SCHEDULER_INTERFACE,
        "SchedulerInterface",
        # No abstract methods: schedulers that know nothing of them have to be constructible.
        adds={RESET_ORDER: _reset_order_of_scheduler, STATS: _stats_of_scheduler},
    ),
    Layer(surface.SCHEDULER, "Scheduler", wraps={RESET_PREFIX_CACHE: _then_reorder}),
    Layer(
        surface.CORE,
        "EngineCore",
        adds={RESET_ORDER: _reset_order_of_core, STATS: _stats_of_core},
        wraps={RESET_PREFIX_CACHE: _then_reorder},
    ),
    Layer(
        surface.CORE_CLIENT,
        "EngineCoreClient",
        adds={
            RESET_ORDER: _refuse(),
            STATS: _refuse(),
            f"{RESET_ORDER}_async": _refuse_async(),
            f"{STATS}_async": _refuse_async(),
        },
    ),
    _asks(
        surface.CORE_CLIENT,
        "InprocClient",
        ask_core,
        in_turn,
        {
            "get_output": in_turn,
            "abort_requests": in_turn,
            "sleep": in_turn,
            "release_kv_cache_memory": in_turn,
            "shutdown": end_turns,
        },
    ),
    _asks(surface.CORE_CLIENT, "SyncMPClient", ask_core_process),
    _asks_async(surface.CORE_CLIENT, "AsyncMPClient", ask_core_processes, "_async"),
    _asks(surface.LLM_ENGINE, "LLMEngine", ask_client),
    _asks_async(surface.ASYNC_LLM, "AsyncLLM", ask_async_client),
    _asks(surface.LLM, "LLM", ask_llm_engine),
)
