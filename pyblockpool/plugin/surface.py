"""What the plugin needs of vLLM, as data, and `probe()`, which holds the installed vLLM against it.

Names and signatures decide, not version numbers: a fork or a nightly that has the surface works,
and a release that has changed it is refused, whatever it is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pyblockpool.errors import BlockQueueError, ConflictError, UnsupportedVLLMError
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, Settings

OLDEST = "0.13.0"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
BLOCK_POOL = "vllm.v1.core.block_pool"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager"
SCHEDULER_INTERFACE = "vllm.v1.core.sched.interface"
SCHEDULER = "vllm.v1.core.sched.scheduler"
CORE = "vllm.v1.engine.core"
CORE_CLIENT = "vllm.v1.engine.core_client"
LLM_ENGINE = "vllm.v1.engine.llm_engine"
ASYNC_LLM = "vllm.v1.engine.async_llm"
LLM = "vllm.entrypoints.llm"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
REQUEST = "vllm.v1.request"
# The methods of vLLM's managers that allocate blocks for a request.
ALLOCATE = ("allocate_new_blocks", "allocate_external_computed_blocks")
# The parameters of the first, which is called for each running request in each step.
ALLOCATE_NEW = ("request_id", "num_tokens", "num_tokens_main_model")

# Methods of vLLM's queue and their parameters behind `self`; those that came after OLDEST.
QUEUE_METHODS: dict[str, tuple[str, ...]] = {
    "popleft": (),
    "popleft_n": ("n",),
    "remove": ("block",),
    "append": ("block",),
    "append_n": ("blocks",),
    "get_all_free_blocks": (),
    "prepend_n": ("blocks",),
    "iter_blocks_after": ("cursor",),
}
LATER_QUEUE_METHODS = {"prepend_n": "0.23.0", "iter_blocks_after": "0.26.0"}
QUEUE_ATTRIBUTES = {"num_free_blocks", "fake_free_list_head", "fake_free_list_tail"}
BLOCK_ATTRIBUTES = ("block_id", "ref_cnt", "prev_free_block", "next_free_block", "is_null")
POOL_METHODS = (
    "get_new_blocks",
    "free_blocks",
    "touch",
    "reset_prefix_cache",
    "get_num_free_blocks",
    "evict_blocks",
)

# What the plugin adds to vLLM's classes from the pool up to the front ends, and the method there
# that gains an argument.
RESET_ORDER = "reset_free_block_queue_order"
STATS = "free_block_queue_stats"
RESET_PREFIX_CACHE = "reset_prefix_cache"
# An attribute of the functions that the plugin has put there.
OURS = "_of_pyblockpool"

_RESET = (RESET_PREFIX_CACHE, ("reset_running_requests", "reset_connector"))
# (module, class, method, its parameters behind `self`) of the chain through the engine. All of it
# is imported in every process, as nothing tells a front end from a worker when plugins are loaded;
# 0.1 s beside the 5 s that a worker takes to import the rest of vLLM.
CHAIN: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (BLOCK_POOL, "BlockPool", RESET_PREFIX_CACHE, ()),
    (COORDINATOR, "KVCacheCoordinator", RESET_PREFIX_CACHE, ()),
    (KV_CACHE_MANAGER, "KVCacheManager", RESET_PREFIX_CACHE, ()),
    (SCHEDULER_INTERFACE, "SchedulerInterface", *_RESET),
    (SCHEDULER, "Scheduler", *_RESET),
    (CORE, "EngineCore", *_RESET),
    (CORE_CLIENT, "EngineCoreClient", *_RESET),
    (CORE_CLIENT, "InprocClient", *_RESET),
    (CORE_CLIENT, "InprocClient", "get_output", ()),
    (CORE_CLIENT, "SyncMPClient", *_RESET),
    (CORE_CLIENT, "SyncMPClient", "call_utility", ("method", "args")),
    (CORE_CLIENT, "AsyncMPClient", f"{RESET_PREFIX_CACHE}_async", _RESET[1]),
    (CORE_CLIENT, "AsyncMPClient", "_call_utility_async", ("method", "args", "engine")),
    (LLM_ENGINE, "LLMEngine", *_RESET),
    (ASYNC_LLM, "AsyncLLM", *_RESET),
    (LLM, "LLM", *_RESET),
)
LATER_IN_CHAIN = {("KVCacheCoordinator", RESET_PREFIX_CACHE): "0.30.0"}

# The same of what the recorder of block tables listens to; a method with two lines may take either.
FREE = ("free", "pop_blocks_for_free")
LOOK_UP = ("get_computed_blocks", "get_computed_blocks_for_connector")
STEP = "update_from_output"
RECORDED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    *((KV_CACHE_MANAGER, "KVCacheManager", name, ("request",)) for name in FREE + LOOK_UP),
    # Since 0.33.0.
    *(
        (KV_CACHE_MANAGER, "KVCacheManager", name, ("request", "max_cache_hit_length"))
        for name in LOOK_UP
    ),
    (KV_CACHE_MANAGER, "KVCacheManager", RESET_PREFIX_CACHE, ()),
    (SCHEDULER, "Scheduler", STEP, ("scheduler_output", "model_runner_output")),
    (CORE, "EngineCore", "shutdown", ()),
)
# Older releases do without.
LATER_RECORDED = {
    ("KVCacheManager", "pop_blocks_for_free"),
    ("KVCacheManager", "get_computed_blocks_for_connector"),
}
# What it asks of requests.
REQUEST_MEMBERS = {
    "Request": ("num_output_tokens",),
    "RequestStatus": ("RUNNING", "WAITING_FOR_REMOTE_KVS", "is_finished", "get_finished_reason"),
}


@dataclass(frozen=True)
class Finding:
    """One answer of the probe.

    Attributes:
        sentence: what was found, readable on its own.
        error: the kind of error that it is, None if all is well.
    """

    sentence: str
    error: type[BlockQueueError] | None = None


def log() -> Any:
    """Below vLLM's own logger, so that vLLM's settings apply."""
    return import_module("vllm.logger").init_logger("vllm.plugins.pyblockpool")


def vllm_version() -> str:
    """Not from the metadata: other distributions of vLLM have another name."""
    return str(import_module("vllm").__version__)


def probe(settings: Settings) -> list[Finding]:
    """Hold the installed vLLM against what values of the variables need; changes nothing.

    Imports vLLM, and for ``native`` the compiled module: NotCompiledError if that does not load.
    """
    findings: list[Finding] = []
    for check in checks(settings):
        try:
            findings.extend(check())
        except BlockQueueError:
            raise
        except Exception as error:
            findings.append(
                Finding(
                    f"vLLM {vllm_version()} does not have what pyblockpool builds on "
                    f"({type(error).__name__}: {error}); vLLM {OLDEST} or later is needed, and a "
                    "pyblockpool made for it",
                    UnsupportedVLLMError,
                )
            )
    return list(dict.fromkeys(findings))  # several checks can fail for one reason


def _the_pool() -> Iterator[Finding]:
    pool_module = import_module(BLOCK_POOL)
    pool = pool_module.BlockPool
    missing = [name for name in POOL_METHODS if not callable(getattr(pool, name, None))]
    if missing:
        yield Finding(
            f"vLLM {vllm_version()} is too old or too different: its BlockPool has no "
            f"{', '.join(missing)}; install vLLM {OLDEST} or later",
            UnsupportedVLLMError,
        )
    used = import_module(COORDINATOR).BlockPool
    for found, where in ((pool, BLOCK_POOL), (used, COORDINATOR)):
        if found.__module__ != BLOCK_POOL or found is not pool:
            yield _replaced(f"{where}.BlockPool", found)
            return
    constructor = inspect.unwrap(pool.__init__)
    if "FreeKVCacheBlockQueue" not in constructor.__code__.co_names:
        yield Finding(
            f"BlockPool.__init__ of vLLM {vllm_version()} does not construct a "
            "FreeKVCacheBlockQueue, so that there is no place to put another queue",
            UnsupportedVLLMError,
        )
    if not missing:
        yield Finding("BlockPool is vLLM's own and has every method that is needed")


def _the_queue() -> Iterator[Finding]:
    from pyblockpool import FreeBlockQueue

    theirs = import_module(KV_CACHE_UTILS).FreeKVCacheBlockQueue
    in_use = import_module(BLOCK_POOL).FreeKVCacheBlockQueue
    if in_use is not theirs and in_use is not FreeBlockQueue:
        yield _replaced(f"{BLOCK_POOL}.FreeKVCacheBlockQueue", in_use)
        return
    if theirs.__module__ != KV_CACHE_UTILS:
        yield _replaced(f"{KV_CACHE_UTILS}.FreeKVCacheBlockQueue", theirs)
        return
    members = {
        name: member
        for name, member in inspect.getmembers(theirs, callable)
        if not name.startswith("_")
    }
    for name, member in members.items():
        if member.__module__ != KV_CACHE_UTILS:
            yield _replaced(f"FreeKVCacheBlockQueue.{name}", member)
            return
    methods = {
        name: tuple(inspect.signature(member).parameters)[1:] for name, member in members.items()
    }
    unknown = [f"{name}()" for name in methods if name not in QUEUE_METHODS]
    unknown += sorted(set(vars(theirs([]))) - QUEUE_ATTRIBUTES)
    missing = [name for name in QUEUE_METHODS if name not in methods | LATER_QUEUE_METHODS]
    changed = [
        f"{name}({', '.join(parameters)})"
        for name, parameters in methods.items()
        if name in QUEUE_METHODS and parameters != QUEUE_METHODS[name]
    ]
    for names, trouble in (
        (unknown, "has members that pyblockpool does not know"),
        (missing, "lacks members that pyblockpool expects"),
        (changed, "takes other arguments than pyblockpool expects"),
    ):
        if names:
            yield Finding(
                f"FreeKVCacheBlockQueue of vLLM {vllm_version()} {trouble}: {', '.join(names)}. "
                "Install a pyblockpool made for this vLLM, or unset VLLM_BLOCK_QUEUE",
                UnsupportedVLLMError,
            )
    if not (unknown or missing or changed):
        yield Finding(f"FreeKVCacheBlockQueue has the {len(methods)} methods that are known")


def _the_blocks() -> Iterator[Finding]:
    from pyblockpool._queue import can_serve_links

    block_class = import_module(KV_CACHE_UTILS).KVCacheBlock
    for where in (KV_CACHE_UTILS, BLOCK_POOL):
        found = import_module(where).KVCacheBlock
        if found is not block_class or found.__module__ != KV_CACHE_UTILS:
            yield _replaced(f"{where}.KVCacheBlock", found)
            return
    block = block_class(block_id=0)
    missing = [name for name in BLOCK_ATTRIBUTES if not hasattr(block, name)]
    if missing or not can_serve_links(block_class):
        yield Finding(
            f"KVCacheBlock of vLLM {vllm_version()} "
            + (f"has no {', '.join(missing)}" if missing else "keeps its links in an unknown way")
            + ", which pyblockpool needs. Unset VLLM_BLOCK_QUEUE, or install another vLLM",
            UnsupportedVLLMError,
        )
    else:
        yield Finding("KVCacheBlock has links that can be served from a native queue")


def _the_chain() -> Iterator[Finding]:
    for module, cls, _, _ in CHAIN:
        owner = getattr(import_module(module), cls)
        for name in (RESET_ORDER, STATS):
            there = getattr(owner, name, None)
            if there is not None and not hasattr(there, OURS):
                yield Finding(
                    f"{cls}.{name}() is there already, by {name_of(there)}: pyblockpool would "
                    "fight with it. Install one made for this vLLM, or switch that plugin off",
                    ConflictError,
                )
                return
    troubles = list(_troubles(CHAIN, LATER_IN_CHAIN, "the order reset", QUEUE_VARIABLE))
    yield from troubles or [
        Finding("the order reset can be passed through every layer of the engine")
    ]


def _the_recorder() -> Iterator[Finding]:
    troubles = list(_troubles(RECORDED, LATER_RECORDED, "the block trace", TRACE_VARIABLE))
    first = {
        (KV_CACHE_MANAGER, "KVCacheManager"): "kv_cache_config",
        (SCHEDULER, "Scheduler"): "vllm_config",
    }
    wrong = [
        f"{cls}.__init__()"
        for (module, cls), parameter in first.items()
        if parameters_of(getattr(import_module(module), cls).__init__)[0]
        not in (parameter, "*args")
    ]
    wrong += [
        f"{cls}.{name}"
        for cls, names in REQUEST_MEMBERS.items()
        for name in names
        if not hasattr(getattr(import_module(REQUEST), cls), name)
    ]
    if wrong:
        troubles.append(
            Finding(
                f"vLLM {vllm_version()} has changed what the block trace is made of "
                f"({', '.join(wrong)}). Install a pyblockpool made for this vLLM, or unset "
                f"{TRACE_VARIABLE}",
                UnsupportedVLLMError,
            )
        )
    yield from troubles or [Finding("the blocks that requests give up can be recorded")]


def _troubles(
    methods: Iterable[tuple[str, str, str, tuple[str, ...]]],
    later: Collection[tuple[str, str]],
    purpose: str,
    variable: str,
) -> Iterator[Finding]:
    """What stands against putting wrappers over methods."""
    missing, changed = [], []
    known: dict[tuple[str, str, str], list[tuple[str, ...]]] = {}
    for module, cls, method, parameters in methods:
        # Somebody else's wrapper may take all there is.
        known.setdefault((module, cls, method), [("*args", "**kwargs")]).append(parameters)
    for (module, cls, method), signatures in known.items():
        found = vars(getattr(import_module(module), cls)).get(method)
        if found is None:
            if (cls, method) not in later:
                missing.append(f"{cls}.{method}()")
        elif not hasattr(found, OURS):
            takes = parameters_of(found) if inspect.isfunction(found) else ()
            if inspect.isfunction(found) and takes in signatures:
                continue
            if not str(getattr(found, "__module__", "")).startswith("vllm."):
                yield _replaced(f"{cls}.{method}", found, variable)
                return
            changed.append(f"{cls}.{method}({', '.join(takes)})")
    for names, trouble in (
        (missing, f"lacks members that {purpose} needs"),
        (changed, f"takes other arguments than {purpose} expects"),
    ):
        if names:
            yield Finding(
                f"vLLM {vllm_version()} {trouble}: {', '.join(names)}. Install a pyblockpool made "
                f"for this vLLM, or unset {variable}",
                UnsupportedVLLMError,
            )


def _the_classes() -> Iterator[Finding]:
    """Whether whoever frees a block says if it has a hash: the policies go by that."""
    release = inspect.unwrap(import_module(BLOCK_POOL).BlockPool.free_blocks)
    # vLLM 0.23 has both ways, too, but leaves it to the caller (`prepend`), who tells it of few.
    tells = {"prepend_n", "append_n"} <= set(release.__code__.co_names)
    if tells and parameters_of(release) == ("ordered_blocks",):
        yield Finding("BlockPool.free_blocks() tells blocks with a hash from those without")
    else:
        yield Finding(
            f"BlockPool.free_blocks() of vLLM {vllm_version()} does not tell blocks with a hash "
            "from those without, which placement needs; install vLLM 0.24.0 or later, or use the "
            "policy lru",
            UnsupportedVLLMError,
        )


def _the_managers() -> Iterator[Finding]:
    base = import_module(MANAGERS).SingleTypeKVCacheManager
    wrong = [
        f"{cls.__name__}.{name}()"
        for cls, name in allocators(base)
        if parameters_of(vars(cls)[name])[:1] != ("request_id",)
    ]
    if "block_size" not in inspect.unwrap(base.__init__).__code__.co_names:
        wrong.append(f"{base.__name__}.block_size")
    manager = inspect.signature(import_module(KV_CACHE_MANAGER).KVCacheManager.__init__)
    if list(manager.parameters)[1] != "kv_cache_config":
        wrong.append("KVCacheManager.__init__()")
    if wrong or "allocate_new_blocks" not in vars(base):
        yield Finding(
            f"vLLM {vllm_version()} allocates the blocks of a request in an unknown way "
            f"({', '.join(wrong) or 'no allocate_new_blocks()'}), so that growth in place cannot "
            "be asked for. Install a pyblockpool made for this vLLM, or use another policy",
            UnsupportedVLLMError,
        )
    else:
        yield Finding("the managers of KV-cache groups allocate the blocks of a request as known")


def allocators(base: Any) -> Iterator[tuple[Any, str]]:
    """(class, method) of a manager class and of all that derive from it, as far as they have it."""
    for name in ALLOCATE:
        if name in vars(base):
            yield base, name
    for derived in base.__subclasses__():
        yield from allocators(derived)


def parameters_of(method: Any) -> tuple[str, ...]:
    """Names behind `self`; ("*args", "**kwargs") for a method that takes anything."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    anything = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if [p.kind for p in parameters] == anything:
        return ("*args", "**kwargs")
    return tuple(p.name for p in parameters)


def _replaced(where: str, by: Any, variable: str = QUEUE_VARIABLE) -> Finding:
    return Finding(
        f"{where} has been replaced by {name_of(by)}, so that pyblockpool "
        f"would fight with it: switch that plugin off, or unset {variable}",
        ConflictError,
    )


def name_of(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None)
    return f"{thing.__module__}.{name}" if name else repr(thing)


def checks(settings: Settings) -> tuple[Callable[[], Iterator[Finding]], ...]:
    """What values of the variables stand on."""
    recorder = () if settings.trace is None else (_the_recorder,)
    if settings.queue is None:
        return recorder
    if settings.queue == "python":
        return (_the_pool, _the_chain, *recorder)
    native = (_the_pool, _the_queue, _the_blocks, _the_chain)
    placed = {"lru": (), "sorted": (_the_classes,), "extent": (_the_classes, _the_managers)}
    return native + placed[settings.policy] + recorder
