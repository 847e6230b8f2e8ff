"""Every change that the plugin makes to vLLM: one record each, applied all or none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pyblockpool.errors import ConflictError
from pyblockpool.plugin.surface import BLOCK_POOL, KV_CACHE_UTILS
from pyblockpool.settings import QUEUE_VARIABLE

RFC = "https://github.com/vllm-project/vllm/issues/40244"


@dataclass(frozen=True)
class Undo:
    """What takes a patch back.

    Attributes:
        refuse: raises, with nothing changed, if it cannot be taken back now.
        act: takes it back.
    """

    refuse: Callable[[], None]
    act: Callable[[], None]


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


def apply_all(patches: Iterable[Patch]) -> Callable[[], None]:
    """Apply in order; where one fails, take the others back and raise what it raised.

    Returns:
        What takes all of them back, or raises with none taken back.
    """
    undos: list[Undo] = []

    def undo_all() -> None:
        for undo in undos:
            undo.refuse()
        while undos:
            undos.pop().act()

    try:
        for patch in patches:
            undos.append(patch.apply())
    except BaseException:
        undo_all()
        raise
    return undo_all


def _accept_variable() -> Undo:
    known: dict[str, Any] = import_module("vllm.envs").environment_variables
    if QUEUE_VARIABLE in known:
        return Undo(refuse=_nothing, act=_nothing)
    # A constant, as the values of registered variables enter the key of the torch.compile cache,
    # and kernels do not depend on the queue. It must not raise: vLLM calls it for its own reasons.
    known[QUEUE_VARIABLE] = lambda: "set"

    def undo() -> None:
        known.pop(QUEUE_VARIABLE, None)

    return Undo(refuse=_nothing, act=undo)


def _nothing() -> None: ...


def _serve_links() -> Undo:
    from pyblockpool._queue import queues_of, serve_links, withdraw_links

    block_class = import_module(KV_CACHE_UTILS).KVCacheBlock

    def refuse() -> None:
        gc.collect()  # pools are cycles: one that was dropped may still be there
        if alive := queues_of(block_class):
            raise RuntimeError(
                f"{alive} native queues still have blocks of {block_class.__qualname__}: "
                "drop them (and their pools) first"
            )

    serve_links(block_class)
    return Undo(refuse, act=lambda: withdraw_links(block_class))


def _swap_queue() -> Undo:
    from pyblockpool import FreeBlockQueue

    module: Any = import_module(BLOCK_POOL)
    original = module.FreeKVCacheBlockQueue
    if original is FreeBlockQueue:
        raise ConflictError(
            f"{BLOCK_POOL}.FreeKVCacheBlockQueue is native already, but not by this copy of the "
            "plugin: load it once"
        )

    def refuse() -> None:
        now = module.FreeKVCacheBlockQueue
        if now is not FreeBlockQueue:
            raise ConflictError(
                f"{BLOCK_POOL}.FreeKVCacheBlockQueue has been replaced again, by "
                f"{now.__module__}.{now.__qualname__}: take that back first"
            )

    def undo() -> None:
        module.FreeKVCacheBlockQueue = original

    module.FreeKVCacheBlockQueue = FreeBlockQueue
    return Undo(refuse, undo)


ACCEPT_VARIABLE = Patch(
    target="vllm.envs:environment_variables",
    apply=_accept_variable,
    why="vLLM warns of VLLM_ variables that it does not know, and can be told to refuse them",
    upstream=RFC,
    retire_when="vLLM knows the variable, or plugins can declare variables of their own",
)
SERVE_LINKS = Patch(
    target=f"{KV_CACHE_UTILS}:KVCacheBlock.prev_free_block, next_free_block",
    apply=_serve_links,
    why="the order is in the native queue; those who read the links of a block get them from there",
    upstream=RFC,
    retire_when="nothing in vLLM, its tests or its connectors reads the links of a block",
)
SWAP_QUEUE = Patch(
    target=f"{BLOCK_POOL}:FreeKVCacheBlockQueue",
    apply=_swap_queue,
    why="BlockPool.__init__ looks the name up here, so each pool built from now on is native",
    upstream=RFC,
    retire_when="BlockPool takes the class of its queue as an argument",
)

PATCHES: dict[str, tuple[Patch, ...]] = {
    "python": (ACCEPT_VARIABLE,),
    "native": (ACCEPT_VARIABLE, SWAP_QUEUE, SERVE_LINKS),
}
