"""What has to come out of a benchmark, worked out from the rules of the policies alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from rivals import EXTENT


def order_of(queue: Any) -> list[int]:
    return ids_of(queue.get_all_free_blocks())


def ids_of(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def is_sound(queue: Any) -> bool:
    """A native queue finds no fault with itself."""
    return not hasattr(queue, "check") or queue.check() == ""


def record(benchmark: Any, operation: str, rival: str, blocks_a_round: int, correct: bool) -> None:
    """Say what was measured; without this, or with a wrong answer, the time does not count."""
    benchmark.extra_info.update(
        operation=operation, rival=rival, blocks_a_round=blocks_a_round, correct=correct
    )
    assert correct, f"{operation}: {rival} gave a wrong answer"


class CachedOrder:
    """The ids of a queue in which all free blocks are cached.

    Extents leave in the order in which the last of their blocks came back; an extent of one block
    is LRU. Those of one call are handed out ascending, but not under ``lru``. Last come the blocks
    of extents that are not whole.

    Args:
        policy: ``lru``, ``sorted`` or ``extent``.
        ids: the free ids, longest free first.
    """

    def __init__(self, policy: str, ids: Sequence[int]) -> None:
        self._size = EXTENT[policy]
        self._ascending = policy != "lru"
        free = Counter(block_id // self._size for block_id in ids)
        whole = {extent for extent, count in free.items() if count == self._size}
        self._extents = deque(e for e in self._by_last(ids) if e in whole)
        self._parts = [block_id for block_id in ids if block_id // self._size not in whole]

    def _opened_for(self, n: int) -> int:
        return -(-n // self._size)

    def _by_last(self, ids: Sequence[int]) -> list[int]:
        """The extents of some ids, in the order of the last id of each."""
        backwards = dict.fromkeys(block_id // self._size for block_id in reversed(ids))
        return list(reversed(backwards))

    def take(self, n: int, singly: bool = False) -> list[int]:
        """``n`` ids in one call or in ``n``; the next ones come from other extents."""
        opened = [self._extents.popleft() for _ in range(self._opened_for(n))]
        if self._ascending and not singly:
            opened.sort()
        return self._ids_in(opened)[:n]

    def rotate(self, n: int, turns: int, singly: bool = False) -> None:
        """The first ``n`` leave as in `take` and come back last, ``turns`` times."""
        opened = self._opened_for(n)
        if singly or not self._ascending or opened == 1:
            self._extents.rotate(-opened * turns)
            return
        for _ in range(turns):
            self._extents += sorted([self._extents.popleft() for _ in range(opened)])

    def touch(self, ids: Sequence[int]) -> None:
        """Blocks of whole extents leave one by one, and each comes back at once."""
        last = self._by_last(ids)
        touched = set(last)
        self._extents = deque(e for e in self._extents if e not in touched)
        self._extents += last

    def ids(self) -> list[int]:
        return self._ids_in(self._extents) + self._parts

    def _ids_in(self, extents: Sequence[int]) -> list[int]:
        size = self._size
        return [block_id for e in extents for block_id in range(e * size, (e + 1) * size)]


def unhashed_order(policy: str, ids: Sequence[int]) -> list[int]:
    """The ids of a queue in which no free block is cached, if it is emptied one by one.

    As they came under ``lru``, else ascending; but whole extents first, the shortest run of
    neighbours first, and then the extents with the most free blocks.
    """
    if policy == "lru":
        return list(ids)
    if policy == "sorted":
        return sorted(ids)
    size = EXTENT[policy]
    free = Counter(block_id // size for block_id in ids)
    whole = sorted(extent for extent, count in free.items() if count == size)
    runs: list[list[int]] = []
    for extent in whole:
        if runs and extent == runs[-1][-1] + 1:
            runs[-1].append(extent)
        else:
            runs.append([extent])
    parts = sorted(free.keys() - set(whole), key=lambda extent: (-free[extent], extent))
    extents = [extent for run in sorted(runs, key=len) for extent in run] + parts
    place = {extent: number for number, extent in enumerate(extents)}
    return sorted(ids, key=lambda block_id: (place[block_id // size], block_id))
