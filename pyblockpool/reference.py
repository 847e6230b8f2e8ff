"""The specification: the queue in plain Python, slow and obviously right.

The native queue must do what this one does, call for call; the tests keep the two equal. The order
is one list of blocks and the links of all blocks are written anew after each change, so nothing
here can be subtly wrong about order, membership or links.

Names and behaviour are those of vLLM's ``FreeKVCacheBlockQueue`` (0.13 to 0.33, in
``vllm/v1/core/kv_cache_utils.py``), but where that class silently corrupts itself this one refuses
and stays as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

POLICIES = ("lru",)
MAX_BLOCK_ID = 2**28 - 1


class FreeListEnd:
    """The fake head or tail of a queue: something to link to, never a block."""

    block_id = -1

    def __init__(self, queue: FreeBlockQueue) -> None:
        self.queue = queue
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class FreeBlockQueue:
    """Free KV-cache blocks in the order in which they are handed out (policy ``lru``).

    Args:
        blocks: blocks (``block_id``, ``prev_free_block``, ``next_free_block``) in any order, with
            any ids, possibly none. A block that is in another queue leaves it.
        policy: ``"lru"``.

    Raises:
        ValueError: no such policy.
        TypeError: something that is not a block.
        RuntimeError: two blocks with one id, an id out of range, an end of a list.
    """

    def __init__(self, blocks: Sequence[Any], policy: str = "lru") -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        blocks = list(blocks)
        known: dict[int, Any] = {}
        for block in blocks:
            self._refuse_impossible(block, "FreeBlockQueue")
            if block.block_id in known:
                raise RuntimeError(f"FreeBlockQueue(): block id {block.block_id} comes twice")
            known[block.block_id] = block
        for block in blocks:
            other = _queue_of(block)
            if other is not None:
                FreeBlockQueue.remove(other, block)
        self.num_free_blocks = len(blocks)
        self.fake_free_list_head = FreeListEnd(self)
        self.fake_free_list_tail = FreeListEnd(self)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self._known = known
        self._order = blocks
        self._relink()

    def popleft(self) -> Any:
        """Take the first block. ValueError when there is none."""
        if not self._order or self._is_cut(self.fake_free_list_head):
            if self.num_free_blocks != 0:
                raise AssertionError(
                    f"num_free_blocks ({self.num_free_blocks}) is out of sync with the free list."
                )
            raise ValueError("No free blocks available")
        return self._take(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take the first ``n`` blocks, in order. AssertionError when there are fewer."""
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"popleft_n({n}): the number of blocks must not be negative")
        if n == 0:
            return []
        if n > self.num_free_blocks:
            raise AssertionError(f"popleft_n({n}): only {self.num_free_blocks} blocks are free")
        if self._is_cut(self.fake_free_list_head):
            raise AssertionError("next_free_block of fake_free_list_head should always exist")
        if n > len(self._order):
            raise RuntimeError(
                f"popleft_n({n}): num_free_blocks says {self.num_free_blocks} "
                f"but {len(self._order)} blocks are queued"
            )
        return self._take(n)

    def remove(self, block: Any) -> None:
        """Take a block out of the middle. RuntimeError when it is not in this queue."""
        if not self._is_queued(block):
            raise RuntimeError(
                f"remove() called on an invalid block: {block!r}: it is not in this queue"
            )
        del self._order[self._position(block)]
        self.num_free_blocks -= 1
        block.prev_free_block = block.next_free_block = None
        self._relink()

    def append(self, block: Any) -> None:
        """Put a block last. RuntimeError, with nothing changed, if it is queued or foreign."""
        if self._is_cut(self.fake_free_list_tail):
            raise RuntimeError("prev_free_block of fake_free_list_tail should always exist")
        self._insert([block], len(self._order), "append")

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Put blocks last, in the given order.

        RuntimeError, with nothing changed, if one is queued, comes twice or is foreign.
        """
        if len(blocks) and self._is_cut(self.fake_free_list_tail):
            raise AssertionError("prev_free_block of fake_free_list_tail should always exist")
        self._insert(list(blocks), len(self._order), "append_n")

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Put blocks first, in the given order.

        RuntimeError, with nothing changed, if one is queued, comes twice or is foreign.
        """
        if len(blocks) and self._is_cut(self.fake_free_list_head):
            raise AssertionError("next_free_block of fake_free_list_head should always exist")
        self._insert(list(blocks), 0, "prepend_n")

    def get_all_free_blocks(self) -> list[Any]:
        """The blocks in the order in which they would be handed out."""
        if self._is_cut(self.fake_free_list_head):
            raise RuntimeError("next_free_block of fake_free_list_head should always exist")
        return list(self._order)

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Lazily, the blocks behind ``cursor`` (None: all). Nothing if it is not queued here.

        The place is looked up at each step, so the queue may change under the walk; the walk ends
        when the block it stands on has left the queue.
        """
        node = self.fake_free_list_head if cursor is None else cursor
        while node is self.fake_free_list_head or self._is_queued(node):
            node = node.next_free_block
            if node is None or node is self.fake_free_list_tail:
                return
            yield node

    def reorder(self) -> None:
        """Canonical order: ascending block ids."""
        self._order.sort(key=lambda block: int(block.block_id))
        self._relink()

    def check(self) -> str:
        """The first broken rule as text, "" if all hold."""
        if self.num_free_blocks != len(self._order):
            return f"num_free_blocks is {self.num_free_blocks} but {len(self._order)} are queued"
        if self._is_cut(self.fake_free_list_head) or self._is_cut(self.fake_free_list_tail):
            return "an end of the list was cut off from outside"
        return ""

    def stats(self) -> dict[str, Any]:
        """Figures of the free list; ``runs`` and ``longest_run`` in the order of the queue."""
        runs = longest = length = 0
        previous = None
        for block in self._order:
            if previous is not None and block.block_id == previous + 1:
                length += 1
            else:
                runs, length = runs + 1, 1
            longest = max(longest, length)
            previous = block.block_id
        return {
            "implementation": "reference",
            "policy": "lru",
            "free": len(self._order),
            "known": len(self._known),
            "runs": runs,
            "longest_run": longest,
        }

    def _take(self, n: int) -> list[Any]:
        taken, self._order = self._order[:n], self._order[n:]
        self.num_free_blocks -= n
        for block in taken:
            block.prev_free_block = block.next_free_block = None
        self._relink()
        return taken

    def _insert(self, blocks: list[Any], position: int, verb: str) -> None:
        seen: set[int] = set()
        for block in blocks:
            self._refuse_impossible(block, verb)
            block_id = block.block_id
            if self._known.get(block_id, block) is not block:
                raise RuntimeError(
                    f"{verb}(): block {block_id} is foreign: "
                    f"this queue has another block with id {block_id}"
                )
            if self._is_queued(block):
                raise RuntimeError(f"{verb}(): block {block_id} is already queued")
            if block_id in seen:
                raise RuntimeError(f"{verb}(): block {block_id} comes twice in one call")
            if block.prev_free_block is not None or block.next_free_block is not None:
                raise RuntimeError(f"{verb}(): block {block_id} is queued in another queue")
            seen.add(block_id)
        self._known.update((block.block_id, block) for block in blocks)
        self._order[position:position] = blocks
        self.num_free_blocks += len(blocks)
        self._relink()

    def _refuse_impossible(self, block: Any, verb: str) -> None:
        if isinstance(block, FreeListEnd):
            raise RuntimeError(f"{verb}(): an end of a free list (block id -1) is not a block")
        for name in ("block_id", "prev_free_block", "next_free_block"):
            if not hasattr(block, name):
                raise TypeError(f"{verb}(): {type(block).__name__} is not a KV-cache block")
        if type(block.block_id) is not int:
            raise TypeError(f"{verb}(): block id {block.block_id!r} is not an int")
        if not 0 <= block.block_id <= MAX_BLOCK_ID:
            raise RuntimeError(f"{verb}(): block id {block.block_id} is not in 0...{MAX_BLOCK_ID}")

    def _is_queued(self, block: Any) -> bool:
        return any(queued is block for queued in self._order)

    def _position(self, block: Any) -> int:
        return next(i for i, queued in enumerate(self._order) if queued is block)

    def _is_cut(self, end: FreeListEnd) -> bool:
        inward = "next" if end is self.fake_free_list_head else "prev"
        return getattr(end, f"{inward}_free_block") is None

    def _relink(self) -> None:
        head, tail = self.fake_free_list_head, self.fake_free_list_tail
        head_is_cut, tail_is_cut = self._is_cut(head), self._is_cut(tail)
        chain = [head, *self._order, tail]
        for before, after in pairwise(chain):
            before.next_free_block = after
            after.prev_free_block = before
        if head_is_cut:
            head.next_free_block = None
        if tail_is_cut:
            tail.prev_free_block = None


def _queue_of(block: Any) -> FreeBlockQueue | None:
    node = block
    while node is not None and not isinstance(node, FreeListEnd):
        node = node.prev_free_block
    return None if node is None else node.queue
