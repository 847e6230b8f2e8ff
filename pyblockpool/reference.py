"""The specification: the queue in plain Python, slow and obviously right.

The native queue must do what this one does, call for call; the tests keep the two equal. Which ids
are handed out next is the business of an order (`LruOrder`, `ExtentOrder`); the links of all blocks
are written anew after each change, so nothing here can be subtly wrong about membership or links.

Names and behaviour are those of vLLM's ``FreeKVCacheBlockQueue`` (0.13 to 0.33, in
``vllm/v1/core/kv_cache_utils.py``), but where that class silently corrupts itself this one refuses
and stays as it was.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

POLICIES = ("lru", "sorted", "extent")
MAX_BLOCK_ID = 2**28 - 1
DEFAULT_EXTENT_SIZE = 8
# How many aged extents with room are looked at, the last to become whole first.
ROOM_LOOKS = 16
MAX_EXTENT_SIZE = 4096


class LruOrder:
    """Policy ``lru``: one list, taken from the front. vLLM's order, always."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def take(self, n: int, after: int | None) -> list[int]:
        taken, self._ids = self._ids[:n], self._ids[n:]
        return taken

    def remove(self, block_id: int) -> None:
        self._ids.remove(block_id)

    def add_cached(self, ids: list[int]) -> None:
        self._ids += ids

    def add_unhashed(self, ids: list[int]) -> None:
        self._ids[:0] = ids

    def walk(self) -> list[int]:
        return list(self._ids)

    def reorder(self) -> None:
        self._ids.sort()

    def forget_hashes(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


class ExtentOrder:
    """Policies ``sorted`` (extents of 1) and ``extent``: LRU over aligned extents, with growth.

    After reservation-based superpage allocation (Navarro et al., OSDI 2002), for KV-cache blocks.

    Extent k is the ids kE ... kE+E-1. Free blocks are of two classes, as in vLLM's order. Whoever
    frees a block says which: *spendable* ones have no hash, or one that is doomed (see `take`);
    *cached* ones have a hash that may be hit. An extent of which all E blocks are free is *whole*:
    *clean* if all of them are spendable, otherwise *aged*. A free block in an extent that is not
    whole is left for the request that has the rest of the extent. Ids that were never seen are
    never free, so block 0, once in use, keeps extent 0 from being whole, as does the end of a pool
    that is no multiple of E.

    Args:
        size: E, blocks in an extent.
        pack_tails: whether the step *Pack* of `take` is done. Without it an extent that was opened
            has one tenant, and the tiles of a table are its own.
    """

    def __init__(self, size: int, pack_tails: bool = False) -> None:
        self._size = size
        self._pack_tails = pack_tails
        self._spendable: set[int] = set()
        # The cached free blocks, longest free first; the aged extents, longest whole first.
        self._cached: list[int] = []
        self._aged: list[int] = []
        # The extent that single blocks without a hint share, None if they have to open one.
        self._shared: int | None = None
        self._early_evictions = 0
        self._shortages = 0

    def take(self, n: int, after: int | None) -> list[int]:
        """Hand out ``n`` free ids, beside the id ``after`` if there is one.

        1. *Grow*: the spendable ids that follow ``after`` in its extent. A single block without a
           hint grows in the extent that the last one was taken from.
        2. *Open* whole extents: clean ones first, in as few pieces as they come, lowest first
           under ``sorted``; then aged ones, longest whole first. Ids are handed out ascending. The
           cached blocks of an opened extent are doomed: they can still be hit while they are free,
           but they are spent next, by whoever grows there.
        3. *Pack*, if asked for: when clean extents run out, what would fill its last extent only in
           part goes where an aged one has room for it, that is, spendable ids; its cached blocks
           stay. So what short tables leave over is not lost to the cache. Not for growth by one
           block.
        4. *Shortage*: what is left in parts, the spendable ids of the extent that has the most of
           them, again and again; then the cached ones, longest free first.
        """
        single = n == 1 and after is None
        may_pack = self._pack_tails and (after is None or n > 1)
        taken: list[int] = []
        if single and self._shared is not None:
            self._spend(self._in_extent(self._shared)[:1], taken)
        while after is not None and len(taken) < n and self._follows(after):
            self._break(after // self._size)
            self._spend([after + 1], taken)
            after += 1
        wanted = -(-(n - len(taken)) // self._size)
        over = (n - len(taken)) % self._size
        room = None
        if may_pack and over and len(self._clean()) < wanted:
            room = self._room_for(over)
        if room is not None:
            self._break(room)
            wanted -= 1
        opened = self._open(wanted)
        for extent in opened:
            self._doom(extent)
        for extent in sorted(opened):
            self._spend(self._in_extent(extent)[: n - len(taken)], taken)
        if room is not None:
            self._spend(self._in_extent(room)[:over], taken)
            opened = [room]
        if len(taken) < n:
            self._shortages += 1
        while len(taken) < n:
            parts = {block_id // self._size for block_id in self._spendable}
            if parts:
                fullest = max(parts, key=lambda extent: (len(self._in_extent(extent)), -extent))
                self._spend(self._in_extent(fullest)[: n - len(taken)], taken)
                opened = [fullest]
            else:
                taken.append(self._cached.pop(0))
        if single and opened:
            (self._shared,) = opened
        return taken

    def remove(self, block_id: int) -> None:
        self._break(block_id // self._size)
        self._spendable.discard(block_id)
        if block_id in self._cached:
            self._cached.remove(block_id)

    def add_cached(self, ids: list[int]) -> None:
        for block_id in ids:
            self._cached.append(block_id)
            self._complete(block_id // self._size)

    def add_unhashed(self, ids: list[int]) -> None:
        for block_id in ids:
            self._spendable.add(block_id)
            self._complete(block_id // self._size)

    def walk(self) -> list[int]:
        """The order in which single blocks without a hint would be handed out, to the last one."""
        spent = copy.deepcopy(self)
        return [spent.take(1, None)[0] for _ in range(len(self._spendable) + len(self._cached))]

    def reorder(self) -> None:
        self.forget_hashes()

    def forget_hashes(self) -> None:
        """All free blocks are unhashed from here on."""
        self._spendable |= set(self._cached)
        self._cached, self._aged, self._shared = [], [], None

    def stats(self) -> dict[str, Any]:
        return {
            "size": self._size,
            "pack_tails": self._pack_tails,
            "unhashed": len(self._spendable),
            "clean": len(self._clean()),
            "aged": len(self._aged),
            "early_evictions": self._early_evictions,
            "shortages": self._shortages,
        }

    def _in_extent(self, extent: int) -> list[int]:
        """The spendable ids of an extent, ascending."""
        ids = range(extent * self._size, (extent + 1) * self._size)
        return [block_id for block_id in ids if block_id in self._spendable]

    def _clean(self) -> list[int]:
        extents = {block_id // self._size for block_id in self._spendable}
        return sorted(e for e in extents if len(self._in_extent(e)) == self._size)

    def _follows(self, block_id: int) -> bool:
        return block_id % self._size != self._size - 1 and block_id + 1 in self._spendable

    def _room_for(self, n: int) -> int | None:
        """The aged extent, of the last few that have room, that has it for ``n`` ids."""
        roomy = [extent for extent in reversed(self._aged) if self._in_extent(extent)]
        enough = [e for e in roomy[:ROOM_LOOKS] if len(self._in_extent(e)) >= n]
        return enough[0] if enough else None

    def _open(self, n: int) -> list[int]:
        """Up to ``n`` whole extents, which are whole no more once something is taken of them."""
        opened: list[int] = []
        clean = self._clean()
        while clean and len(opened) < n:
            if self._size == 1:
                run = clean
            else:
                runs = _runs(clean)
                enough = [run for run in runs if len(run) >= n - len(opened)]
                run = min(enough, key=len) if enough else max(runs, key=len)
            piece = run[: n - len(opened)]
            opened += piece
            clean = [extent for extent in clean if extent not in piece]
        aged, self._aged = self._aged[: n - len(opened)], self._aged[n - len(opened) :]
        return opened + aged

    def _doom(self, extent: int) -> None:
        """Give up the cached blocks of an extent.

        The longest stretch of them in LRU order leaves in its turn; the others leave early, for
        their neighbours' sake.
        """
        ids = range(extent * self._size, (extent + 1) * self._size)
        places = [place for place, block_id in enumerate(self._cached) if block_id in ids]
        stretches = [len(stretch) for stretch in _runs(places)]
        self._early_evictions += sum(stretches) - max(stretches, default=0)
        self._spendable |= {self._cached[place] for place in places}
        self._cached = [block_id for block_id in self._cached if block_id not in ids]

    def _spend(self, ids: list[int], taken: list[int]) -> None:
        self._spendable -= set(ids)
        taken += ids

    def _break(self, extent: int) -> None:
        """One of its blocks is about to be in use."""
        if extent in self._aged:
            self._aged.remove(extent)

    def _complete(self, extent: int) -> None:
        """One of its blocks was freed: if that was the last one, the extent is whole again."""
        ids = range(extent * self._size, (extent + 1) * self._size)
        cached = [block_id for block_id in ids if block_id in self._cached]
        if len(cached) + len(self._in_extent(extent)) < self._size:
            return
        if cached:
            self._aged.append(extent)
        if self._shared == extent:
            self._shared = None


def _runs(numbers: list[int]) -> list[list[int]]:
    """Stretches of ascending neighbours in a sorted list."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


class FreeListEnd:
    """The fake head or tail of a queue: something to link to, never a block."""

    block_id = -1

    def __init__(self, queue: FreeBlockQueue) -> None:
        self.queue = queue
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class FreeBlockQueue:
    """Free KV-cache blocks in the order in which they are handed out.

    Args:
        blocks: blocks (``block_id``, ``prev_free_block``, ``next_free_block``) in any order, with
            any ids, possibly none. A block that is in another queue leaves it.
        policy: ``"lru"``, ``"sorted"`` or ``"extent"``.
        size: blocks in an extent, for policy ``extent``: a power of two from 1 to 4,096.
        pack_tails: for policy ``extent``, whether the last, partly filled extents of tables are
            shared. Keeps more of short tables in the cache, at the price of tiles with two tenants.

    Attributes:
        num_free_blocks: how many are free. May be set, to make a pool look full; what is handed out
            or put back counts on from there.
        fake_free_list_head, fake_free_list_tail: what the links of the first and the last block
            lead to.

    Raises:
        ValueError: no such policy, or no such size.
        TypeError: something that is not a block, or a size that is not an integer.
        RuntimeError: two blocks with one id, an id out of range, an end of a list.
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        policy: str = "lru",
        size: int = DEFAULT_EXTENT_SIZE,
        pack_tails: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        policy = POLICIES[POLICIES.index(policy)]  # a plain str, whatever was equal to it
        size = operator.index(size)
        if not 1 <= size <= MAX_EXTENT_SIZE or size & (size - 1):
            raise ValueError(f"size {size} is not a power of two from 1 to {MAX_EXTENT_SIZE}")
        pack_tails = bool(pack_tails)
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
        self._policy = policy
        self._order: LruOrder | ExtentOrder
        self._order = (
            LruOrder()
            if policy == "lru"
            else ExtentOrder(1 if policy == "sorted" else size, pack_tails)
        )
        self._order.add_unhashed(list(known))
        self._hint: int | None = None
        self._relink()

    def popleft(self) -> Any:
        """Take the first block.

        Raises:
            ValueError: there is none.
            AssertionError: there is none, and ``num_free_blocks`` says otherwise.
        """
        if not self._queued or self._is_cut(self.fake_free_list_head):
            if self.num_free_blocks != 0:
                raise AssertionError(
                    f"num_free_blocks ({self.num_free_blocks}) is out of sync with the free list."
                )
            raise ValueError("No free blocks available")
        return self._take(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take the first ``n`` blocks, in order.

        Raises:
            AssertionError: ``num_free_blocks`` says that there are fewer.
            RuntimeError: there are fewer, and it says otherwise.
            ValueError, TypeError: ``n`` is negative, or not an integer.
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"popleft_n({n}): the number of blocks must not be negative")
        if n == 0:
            return []
        if n > self.num_free_blocks:
            raise AssertionError(f"popleft_n({n}): only {self.num_free_blocks} blocks are free")
        if self._is_cut(self.fake_free_list_head):
            raise AssertionError("next_free_block of fake_free_list_head should always exist")
        if n > len(self._queued):
            raise RuntimeError(
                f"popleft_n({n}): num_free_blocks says {self.num_free_blocks} "
                f"but {len(self._queued)} blocks are queued"
            )
        return self._take(n)

    def remove(self, block: Any) -> None:
        """Take a block out of the middle. RuntimeError when it is not in this queue."""
        if not self._is_queued(block):
            raise RuntimeError(
                f"remove() called on an invalid block: {block!r}: it is not in this queue"
            )
        self._order.remove(block.block_id)
        self.num_free_blocks -= 1
        block.prev_free_block = block.next_free_block = None
        self._relink()

    def append(self, block: Any) -> None:
        """Put a block last.

        RuntimeError, with nothing changed, if it is queued or foreign; TypeError if it is no block.
        """
        if self._is_cut(self.fake_free_list_tail):
            raise RuntimeError("prev_free_block of fake_free_list_tail should always exist")
        self._insert([block], self._order.add_cached, "append")

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Put blocks last, in the given order.

        RuntimeError, with nothing changed, if one is queued, comes twice or is foreign; TypeError
        if one is no block.
        """
        if len(blocks) and self._is_cut(self.fake_free_list_tail):
            raise AssertionError("prev_free_block of fake_free_list_tail should always exist")
        self._insert(list(blocks), self._order.add_cached, "append_n")

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Put blocks first, in the given order.

        RuntimeError, with nothing changed, if one is queued, comes twice or is foreign; TypeError
        if one is no block.
        """
        if len(blocks) and self._is_cut(self.fake_free_list_head):
            raise AssertionError("next_free_block of fake_free_list_head should always exist")
        self._insert(list(blocks), self._order.add_unhashed, "prepend_n")

    def get_all_free_blocks(self) -> list[Any]:
        """The blocks in the order in which they would be handed out."""
        if self._is_cut(self.fake_free_list_head):
            raise RuntimeError("next_free_block of fake_free_list_head should always exist")
        return list(self._queued)

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
        """Canonical order: ascending block ids; under ``extent``, whole extents first."""
        self._order.reorder()
        self._relink()

    def forget_hashes(self) -> None:
        """Free blocks have lost their prefix-cache hashes: none is worth keeping any more."""
        self._order.forget_hashes()
        self._relink()

    def grow_after(self, block: Any) -> None:
        """The next blocks are for a request whose last block is this one; None: for any.

        Under ``extent`` they are taken beside it if they can. What is handed out becomes the last
        block in turn. RuntimeError, with nothing changed, if the block is not in use here.
        """
        if block is None:
            self._hint = None
            return
        is_known = any(known is block for known in self._known.values())
        if not is_known or self._is_queued(block) or block.prev_free_block is not None:
            raise RuntimeError(f"grow_after(): {block!r} is not a block of this queue in use")
        self._hint = block.block_id

    def check(self) -> str:
        """The first broken rule as text, "" if all hold."""
        if self.num_free_blocks != len(self._queued):
            return f"num_free_blocks is {self.num_free_blocks} but {len(self._queued)} are queued"
        if self._is_cut(self.fake_free_list_head) or self._is_cut(self.fake_free_list_tail):
            return "an end of the list was cut off from outside"
        return ""

    def stats(self) -> dict[str, Any]:
        """Figures of the free list; ``runs`` and ``longest_run`` in the order of the queue."""
        runs = longest = length = 0
        previous = None
        for block in self._queued:
            if previous is not None and block.block_id == previous + 1:
                length += 1
            else:
                runs, length = runs + 1, 1
            longest = max(longest, length)
            previous = block.block_id
        return {
            "implementation": "reference",
            "policy": self._policy,
            "free": len(self._queued),
            "known": len(self._known),
            "runs": runs,
            "longest_run": longest,
        } | self._order.stats()

    def _take(self, n: int) -> list[Any]:
        taken = [self._known[block_id] for block_id in self._order.take(n, self._hint)]
        if self._hint is not None:
            self._hint = taken[-1].block_id
        self.num_free_blocks -= n
        for block in taken:
            block.prev_free_block = block.next_free_block = None
        self._relink()
        return taken

    def _insert(self, blocks: list[Any], add: Callable[[list[int]], None], verb: str) -> None:
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
        add([block.block_id for block in blocks])
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
        return any(queued is block for queued in self._queued)

    def _is_cut(self, end: FreeListEnd) -> bool:
        inward = "next" if end is self.fake_free_list_head else "prev"
        return getattr(end, f"{inward}_free_block") is None

    def _relink(self) -> None:
        head, tail = self.fake_free_list_head, self.fake_free_list_tail
        head_is_cut, tail_is_cut = self._is_cut(head), self._is_cut(tail)
        self._queued = [self._known[block_id] for block_id in self._order.walk()]
        chain = [head, *self._queued, tail]
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
