"""The compiled module, built from csrc/queue.pyx."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypedDict, final, type_check_only

from typing_extensions import NotRequired, disjoint_base

__all__ = [
    "DEFAULT_EXTENT_SIZE",
    "MAX_BLOCK_ID",
    "MAX_EXTENT_SIZE",
    "POLICIES",
    "FreeBlockQueue",
    "FreeListEnd",
    "can_serve_links",
    "queues_of",
    "serve_links",
    "withdraw_links",
]

MAX_BLOCK_ID: Final = 268_435_455
POLICIES: Final = ("lru", "sorted", "extent")
DEFAULT_EXTENT_SIZE: Final = 8
MAX_EXTENT_SIZE: Final = 4096

@type_check_only
class QueueStats(TypedDict):
    """Figures of a free list.

    implementation: ``"native"``. policy. free: blocks queued. known: blocks ever seen. runs:
    stretches of the queue, in its order, in which each id is the one before it plus 1.
    longest_run: blocks in the longest of them. Under ``sorted`` and ``extent`` also: size, blocks
    in an extent. pack_tails: whether tables share their last extents. unhashed: free blocks without
    a hash, or with one that is given up. clean, aged: extents that are free as a whole, without and
    with cached blocks. early_evictions: cached blocks that were given up out of turn, for the sake
    of their extent: at most E-1 of each that was opened. shortages: calls that found too few whole
    extents.
    """

    implementation: str
    policy: str
    free: int
    known: int
    runs: int
    longest_run: int
    size: NotRequired[int]
    pack_tails: NotRequired[bool]
    unhashed: NotRequired[int]
    clean: NotRequired[int]
    aged: NotRequired[int]
    early_evictions: NotRequired[int]
    shortages: NotRequired[int]

@final
class FreeListEnd:
    """The fake head or tail of a queue: something to link to and to stop at, never a block."""

    block_id: int
    @property
    def prev_free_block(self) -> Any: ...
    @prev_free_block.setter
    def prev_free_block(self, value: Any) -> None: ...
    @property
    def next_free_block(self) -> Any: ...
    @next_free_block.setter
    def next_free_block(self, value: Any) -> None: ...

@disjoint_base
class FreeBlockQueue:
    """Free KV-cache blocks in the order in which they are handed out.

    Errors, units and the specification: ``pyblockpool.reference.FreeBlockQueue``. Here also
    TypeError: blocks of several classes, or of one whose links cannot be served. MemoryError, with
    nothing changed.
    """

    @property
    def num_free_blocks(self) -> int: ...
    @num_free_blocks.setter
    def num_free_blocks(self, count: int) -> None: ...
    @property
    def fake_free_list_head(self) -> FreeListEnd: ...
    @property
    def fake_free_list_tail(self) -> FreeListEnd: ...
    def __init__(
        self, blocks: Iterable[Any], policy: str = "lru", size: int = 8, pack_tails: bool = False
    ) -> None: ...
    def popleft(self) -> Any: ...
    def popleft_n(self, n: int) -> list[Any]: ...
    def remove(self, block: Any) -> None: ...
    def append(self, block: Any) -> None: ...
    def append_n(self, blocks: Sequence[Any]) -> None: ...
    def prepend_n(self, blocks: Sequence[Any]) -> None: ...
    def get_all_free_blocks(self) -> list[Any]: ...
    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]: ...
    def reorder(self) -> None: ...
    def forget_hashes(self) -> None: ...
    def grow_after(self, block: Any) -> None: ...
    def check(self) -> str: ...
    def stats(self) -> QueueStats: ...

def can_serve_links(block_class: type) -> bool:
    """Whether `serve_links` would do; changes nothing."""

def queues_of(block_class: type) -> int:
    """How many native queues that are alive have blocks of a class."""

def serve_links(block_class: type) -> None:
    """Serve the links of a class of blocks from native queues; TypeError if that cannot be done."""

def withdraw_links(block_class: type) -> None:
    """Undo `serve_links`; RuntimeError, with nothing changed, while such queues are alive."""
