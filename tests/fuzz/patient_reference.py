"""The specification, made fast enough for millions of operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyblockpool import reference


class PatientReference(reference.FreeBlockQueue):
    """The specification, which works out its order and its links when somebody looks at them.

    As it stands it walks through all blocks after each change. What is handed out, and what is
    refused, is its own code, as it is. Links are those of the last look: read them after one.
    """

    _looked_at: list[Any]
    _stale = False

    def look(self) -> None:
        """Order and links are true from here on, to the next change."""
        if self._stale:
            self._stale = False
            super()._relink()

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        walk = super().iter_blocks_after(cursor)
        while True:
            self.look()
            block = next(walk, None)
            if block is None:
                return
            yield block

    def _relink(self) -> None:
        self._stale = True

    @property
    def _queued(self) -> Any:
        return _Queued(self) if self._stale else self._looked_at

    @_queued.setter
    def _queued(self, blocks: list[Any]) -> None:
        self._looked_at = blocks

    def _is_queued(self, block: Any) -> bool:
        block_id = getattr(block, "block_id", -1)
        if self._known.get(block_id) is not block:
            return False
        order = self._order
        if isinstance(order, reference.LruOrder):
            return block_id in order._ids
        return block_id in order._spendable or block_id in order._cached


class _Queued:
    """The queued blocks of a queue that nobody has looked at since it changed."""

    def __init__(self, queue: PatientReference) -> None:
        self._queue = queue

    def __len__(self) -> int:
        order = self._queue._order
        if isinstance(order, reference.LruOrder):
            return len(order._ids)
        return len(order._spendable) + len(order._cached)

    def __iter__(self) -> Iterator[Any]:
        self._queue.look()
        return iter(self._queue._looked_at)
