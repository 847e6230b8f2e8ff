"""Every change that the plugin makes to vLLM: one record each, applied all or none."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyblockpool.errors import ConflictError
from pyblockpool.plugin import surface
from pyblockpool.plugin.placement import QueueMaker, grow_in_place, grow_in_place_when_full
from pyblockpool.plugin.reset import DOCS, LAYERS, Layer
from pyblockpool.plugin.surface import BLOCK_POOL, KV_CACHE_UTILS, name_of
from pyblockpool.settings import Settings

if TYPE_CHECKING:
    from pyblockpool.plugin.recorder import Recorder

RFC = "https://github.com/vllm-project/vllm/issues/40244"
_BLOCKS_ARE_TOLD = "vLLM tells plugins of the blocks that a request gives up, or logs them itself"


@dataclass(frozen=True)
class Undo:
    """What takes a patch back.

    Attributes:
        act: takes it back.
        obstacle: why it cannot be taken back now, as an error to raise; None if it can.
    """

    act: Callable[[], None]
    obstacle: Callable[[], Exception | None] = lambda: None


@dataclass(frozen=True)
class Patch:
    """One change of vLLM.

    Attributes:
        target: what is changed, as ``module:attribute``.
        apply: makes the change and returns what takes it back.
        why: what it is for.
        upstream: the thread in vLLM's repository that it belongs to.
        retire_when: what has to happen in vLLM for it to go.
    """

    target: str
    apply: Callable[[], Undo]
    why: str
    upstream: str
    retire_when: str


class Applied:
    """Patches that have been applied together."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        """Apply in order; where one fails, take the others back and raise what it raised."""
        self._undos: list[Undo] = []
        try:
            for patch in patches:
                self._undos.append(patch.apply())
        except BaseException:
            self.roll_back()
            raise

    def undo(self) -> None:
        """Take all of them back, or raise with none taken back."""
        for undo in self._undos:
            if obstacle := undo.obstacle():
                raise obstacle
        self.roll_back()

    def roll_back(self) -> str:
        """Take back what can be, in any case; what could not, as text to add to a message."""
        left = []
        while self._undos:
            undo = self._undos.pop()
            if obstacle := undo.obstacle():
                left.append(f"; not taken back: {obstacle}")
            else:
                undo.act()
        return "".join(left)


def _accept_variable(name: str) -> Undo:
    known: dict[str, Any] = import_module("vllm.envs").environment_variables
    if name in known:
        return Undo(act=lambda: None)

    def getter() -> str:
        # A constant, as the values of registered variables enter the key of the torch.compile
        # cache, and kernels depend on none of ours. vLLM calls it at any time: never raises.
        return "set"

    def undo() -> None:
        if known.get(name) is getter:
            del known[name]

    known[name] = getter
    return Undo(act=undo)


def _serve_links() -> Undo:
    from pyblockpool._queue import queues_of, serve_links, withdraw_links

    block_class = import_module(KV_CACHE_UTILS).KVCacheBlock

    def obstacle() -> Exception | None:
        gc.collect()  # pools are cycles: one that was dropped may still be there
        if alive := queues_of(block_class):
            return RuntimeError(
                f"{alive} native queues still have blocks of {block_class.__qualname__}: "
                "drop them (and their pools) first"
            )
        return None

    serve_links(block_class)
    return Undo(act=lambda: withdraw_links(block_class), obstacle=obstacle)


def _swap_queue(queue: Any) -> Undo:
    """Put something that makes native queues in the place of vLLM's class."""
    from pyblockpool import FreeBlockQueue

    module: Any = import_module(BLOCK_POOL)
    original = module.FreeKVCacheBlockQueue
    if original is FreeBlockQueue or isinstance(original, QueueMaker):
        raise ConflictError(
            f"{BLOCK_POOL}.FreeKVCacheBlockQueue is native already, but not by this copy of the "
            "plugin: load it once"
        )

    def obstacle() -> Exception | None:
        now = module.FreeKVCacheBlockQueue
        if now is not queue:
            return ConflictError(
                f"{BLOCK_POOL}.FreeKVCacheBlockQueue has been replaced again, by "
                f"{name_of(now)}: take that back first"
            )
        return None

    def undo() -> None:
        module.FreeKVCacheBlockQueue = original

    module.FreeKVCacheBlockQueue = queue
    return Undo(act=undo, obstacle=obstacle)


# Our methods, and what each was put over: two patches may meet in a method.
_beneath: dict[Any, Any] = {}


def _wrap(cls: Any, name: str, wrapper: Callable[[Any], Any]) -> Undo:
    """Replace a method that a class defines by a wrapper of it."""
    original = vars(cls)[name]
    wrapped = wrapper(original)
    setattr(cls, name, wrapped)
    _beneath[wrapped] = original

    def undo() -> None:
        setattr(cls, name, original)
        _beneath.pop(wrapped, None)

    return Undo(act=undo, obstacle=partial(_replaced_again, cls, {name: wrapped}))


def _replaced_again(cls: Any, ours: Mapping[str, Any]) -> Exception | None:
    """Why methods of ours cannot be taken out of a class: somebody has put others on top."""
    for name, method in ours.items():
        top = now = vars(cls).get(name)
        while now is not method and now in _beneath:
            now = _beneath[now]
        if now is not method:
            return ConflictError(
                f"{name_of(cls)}.{name} has been replaced again, by {name_of(top)}: take that "
                "back first"
            )
    return None


def _extend(layer: Layer) -> Undo:
    """Add the methods of a layer to its class."""
    cls = getattr(import_module(layer.module), layer.cls)
    before = dict(vars(cls))
    for name in layer.adds:
        if name in before:
            raise ConflictError(
                f"{name_of(cls)}.{name}() is there already, by {name_of(before[name])}: if that is "
                "another copy of this plugin, load it once; otherwise switch that plugin off"
            )
    gained = dict(layer.adds)
    gained |= {name: wrap(before[name]) for name, wrap in layer.wraps.items() if name in before}
    for name, method in gained.items():
        method.__module__, method.__name__ = cls.__module__, name
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(method, surface.OURS, True)
        docs = [inspect.getdoc(before[name]) if name in before else None]
        docs.append(DOCS.get(name.removesuffix("_async")))
        method.__doc__ = "\n\n".join(filter(None, docs)) or None
        setattr(cls, name, method)
        _beneath[method] = before.get(name)

    def undo() -> None:
        for name, method in gained.items():
            if name in before:
                setattr(cls, name, before[name])
            else:
                delattr(cls, name)
            _beneath.pop(method, None)

    return Undo(act=undo, obstacle=partial(_replaced_again, cls, gained))


SERVE_LINKS = Patch(
    target=f"{KV_CACHE_UTILS}:KVCacheBlock.prev_free_block, next_free_block",
    apply=_serve_links,
    why="the order is in the native queue; those who read the links of a block get them from there",
    upstream=RFC,
    retire_when="nothing in vLLM, its tests or its connectors reads the links of a block",
)
RESETS = tuple(
    Patch(
        target=f"{layer.module}:{layer.cls}.{', '.join([*layer.adds, *layer.wraps])}",
        apply=partial(_extend, layer),
        why="callers of a long-lived engine can put the free queue back in order between rounds",
        upstream=RFC,
        retire_when="vLLM has a reset of the order of its free queue through every layer",
    )
    for layer in LAYERS
)


def patches(settings: Settings) -> tuple[Patch, ...]:
    """What values of the variables change, in the order in which it is applied."""
    accepted = tuple(map(_accept, settings.variables()))
    if settings.queue is None:
        return (*accepted, *_record(settings))
    # A reset of the cache is recorded below the one that may go on to the order, whose own record
    # comes second.
    resets = (*_record(settings), *RESETS, *_record_order_resets(settings))
    if settings.queue == "python":
        return (*accepted, *resets)

    from pyblockpool import FreeBlockQueue

    native = (*accepted, SERVE_LINKS, *resets)
    if settings.policy == "lru":
        return (_swap(FreeBlockQueue), *native)
    maker = QueueMaker(settings, FreeBlockQueue)
    if settings.policy == "sorted":
        return (_swap(maker), *native)
    return (_swap(maker), _resolve_size(maker), *_grow(), *native)


def _accept(variable: str) -> Patch:
    return Patch(
        target="vllm.envs:environment_variables",
        apply=partial(_accept_variable, variable),
        why="vLLM warns of VLLM_ variables that it does not know, and can be told to refuse them",
        upstream=RFC,
        retire_when="vLLM knows the variable, or plugins can declare variables of their own",
    )


def _swap(queue: Any) -> Patch:
    return Patch(
        target=f"{BLOCK_POOL}:FreeKVCacheBlockQueue",
        apply=partial(_swap_queue, queue),
        why="BlockPool.__init__ looks the name up here, so each pool built from now on is native",
        upstream=RFC,
        retire_when="BlockPool takes the class of its queue as an argument",
    )


def _resolve_size(maker: QueueMaker) -> Patch:
    manager = import_module(surface.KV_CACHE_MANAGER).KVCacheManager
    return Patch(
        target=f"{surface.KV_CACHE_MANAGER}:KVCacheManager.__init__",
        apply=partial(_wrap, manager, "__init__", maker.while_building),
        why="an extent is 128 tokens of the cache that kernels read: that pool is built in here, "
        "and here the block size is known",
        upstream=RFC,
        retire_when="BlockPool knows what it is for and the size of its blocks in tokens",
    )


def _grow() -> Iterator[Patch]:
    base = import_module(surface.MANAGERS).SingleTypeKVCacheManager
    for cls, name in surface.allocators(base):
        at_each_step = surface.parameters_of(vars(cls)[name]) == surface.ALLOCATE_NEW
        yield Patch(
            target=f"{surface.MANAGERS}:{cls.__qualname__}.{name}",
            apply=partial(
                _wrap, cls, name, grow_in_place_when_full if at_each_step else grow_in_place
            ),
            why="the queue has to know the last block of a request to take the next one beside it",
            upstream=RFC,
            retire_when="BlockPool.get_new_blocks takes the last block of the request",
        )


def _record(settings: Settings) -> Iterator[Patch]:
    """What the recorder listens to, but for the resets of the order."""
    if settings.trace is None:
        return
    from pyblockpool.plugin import recorder

    ours = recorder.Recorder(settings)
    manager = import_module(surface.KV_CACHE_MANAGER).KVCacheManager
    scheduler = import_module(surface.SCHEDULER).Scheduler
    core = import_module(surface.CORE).EngineCore
    yield _hook(scheduler, "__init__", ours.knowing_config, "it knows the model of a trace")
    yield Patch(
        target=f"{surface.KV_CACHE_MANAGER}:KVCacheManager.__init__",
        apply=partial(_begin_sections, manager, ours),
        why="here the geometry of the cache is resolved and its pool is built: a trace begins",
        upstream=RFC,
        retire_when=_BLOCKS_ARE_TOLD,
    )
    for name in surface.FREE:
        if name in vars(manager):
            yield _hook(manager, name, recorder.before_freeing, "a request gives up its blocks")
    for name in surface.LOOK_UP:
        if name in vars(manager):
            yield _hook(
                manager, name, recorder.after_lookup, "a request is scheduled, and with what hits"
            )
    yield _hook(
        manager,
        surface.RESET_PREFIX_CACHE,
        recorder.after_reset("prefix_cache"),
        "a round of a trace ends with a reset",
    )
    yield _hook(scheduler, surface.STEP, recorder.after_step, "a request gets its first token")
    yield _hook(core, "shutdown", recorder.at_shutdown, "the trace of this engine ends")


def _record_order_resets(settings: Settings) -> Iterator[Patch]:
    if settings.trace is None:
        return
    from pyblockpool.plugin import recorder

    yield _hook(
        import_module(surface.KV_CACHE_MANAGER).KVCacheManager,
        surface.RESET_ORDER,
        recorder.after_reset("order"),
        "a round of a trace ends with a reset",
    )


def _hook(cls: Any, name: str, wrapper: Callable[[Any], Any], why: str) -> Patch:
    return Patch(
        target=f"{cls.__module__}:{cls.__qualname__}.{name}",
        apply=partial(_wrap, cls, name, wrapper),
        why=f"a block trace is told here: {why}",
        upstream=RFC,
        retire_when=_BLOCKS_ARE_TOLD,
    )


def _begin_sections(manager: Any, recorder: Recorder) -> Undo:
    undo = _wrap(manager, "__init__", recorder.beginning)

    def act() -> None:
        undo.act()
        recorder.close()

    return Undo(act=act, obstacle=undo.obstacle)
