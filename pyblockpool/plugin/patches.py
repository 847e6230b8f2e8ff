"""Every change that the plugin makes to vLLM: one record each, applied all or none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pyblockpool.plugin.surface import BLOCK_POOL, KV_CACHE_UTILS
from pyblockpool.settings import QUEUE_VARIABLE

Undo = Callable[[], None]
RFC = "https://github.com/vllm-project/vllm/issues/40244"


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


def apply_all(patches: Iterable[Patch]) -> Undo:
    """Apply in order; where one fails, take the others back and raise what it raised."""
    undos: list[Undo] = []

    def undo_all() -> None:
        while undos:
            undos[-1]()
            undos.pop()

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
        return lambda: None
    # A constant, as the values of registered variables enter the key of the torch.compile cache,
    # and kernels do not depend on the queue. It must not raise: vLLM calls it for its own reasons.
    known[QUEUE_VARIABLE] = lambda: "set"
    return lambda: known.__delitem__(QUEUE_VARIABLE)


def _serve_links() -> Undo:
    from pyblockpool._queue import serve_links, withdraw_links

    block_class = import_module(KV_CACHE_UTILS).KVCacheBlock

    def undo() -> None:
        gc.collect()  # pools are cycles: one that was dropped may still be there
        withdraw_links(block_class)

    serve_links(block_class)
    return undo


def _swap_queue() -> Undo:
    from pyblockpool import FreeBlockQueue

    module: Any = import_module(BLOCK_POOL)
    original = module.FreeKVCacheBlockQueue
    module.FreeKVCacheBlockQueue = FreeBlockQueue

    def undo() -> None:
        module.FreeKVCacheBlockQueue = original

    return undo


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
    # Undone from the end: what may refuse to be undone comes last.
    "native": (ACCEPT_VARIABLE, SWAP_QUEUE, SERVE_LINKS),
}
