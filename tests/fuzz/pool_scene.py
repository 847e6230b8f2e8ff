"""vLLM's real block pools side by side: around the native queue, around vLLM's, around the
specification.

Under policy `lru` all that can be seen of a pool must be the same as with vLLM's queue; under the
others as with the specification in its place. There may be two pools, whose blocks are freed
together. The order reset is the plugin's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import pools
from implementations import QUEUES, ids
from patient_reference import PatientReference
from scenes import SIZES, Divergence, Do, Ids, Operation, below, pick, some

from pyblockpool.plugin.order import blocks_in_use, reset_order

SIDES: dict[str, Any] = QUEUES | {"reference": PatientReference}


@dataclass(frozen=True)
class PoolSetting:
    """Pools of one policy.

    Attributes:
        policy, size, pack_tails: as for `FreeBlockQueue`.
        rival: what the native queue is compared with, a key of `SIDES`.
        caching: whether prefix caching is on.
        num_blocks: in each pool, the null block included.
    """

    kind: ClassVar[str] = "pool"

    policy: str
    size: int
    pack_tails: bool
    rival: str
    caching: bool
    num_blocks: list[int]

    @property
    def num_ids(self) -> int:
        return max(self.num_blocks)

    def scene(self) -> PoolScene:
        return PoolScene(self)

    def simpler(self) -> Iterator[PoolSetting]:
        if len(self.num_blocks) > 1:
            yield replace(self, num_blocks=self.num_blocks[:1])
        for at, count in enumerate(self.num_blocks):
            for fewer in (count // 2, count - 1):
                if fewer > 0:
                    num_blocks = [*self.num_blocks[:at], fewer, *self.num_blocks[at + 1 :]]
                    yield replace(self, num_blocks=num_blocks)
        yield replace(self, pack_tails=False)
        yield replace(self, caching=False)


class Side:
    """The pools of one implementation, and what it told those who had unpinned blocks."""

    def __init__(self, name: str, setting: PoolSetting) -> None:
        self.name = name
        self.reused: list[Ids] = [[] for _ in setting.num_blocks]
        self._setting = setting
        self.pools = [self._pool(count) for count in setting.num_blocks]

    @property
    def is_strict(self) -> bool:
        return self.name != "vllm"

    def blocks(self, p: int, block_ids: Ids) -> list[Any]:
        blocks = self.pools[p].blocks
        return [blocks[i] for i in block_ids]

    def _pool(self, num_blocks: int) -> Any:
        from vllm.v1.core import block_pool

        theirs = block_pool.FreeKVCacheBlockQueue
        block_pool.FreeKVCacheBlockQueue = self._queue
        try:
            return pools.pool(num_blocks, self._setting.caching)
        finally:
            block_pool.FreeKVCacheBlockQueue = theirs

    def _queue(self, blocks: list[Any]) -> Any:
        if not self.is_strict:
            return SIDES[self.name](blocks)
        setting = self._setting
        return SIDES[self.name](blocks, setting.policy, setting.size, setting.pack_tails)


class PoolScene:
    """See scenes.py. The first side is the native one."""

    def __init__(self, setting: PoolSetting) -> None:
        self.setting = setting
        self.sides = [Side(name, setting) for name in ("native", setting.rival)]
        # Blocks that are out of the queue without a reference, as sink blocks are.
        self.gone: list[set[int]] = [set() for _ in setting.num_blocks]
        self._native = self.sides[0]
        self.can_unpin = hasattr(self.pool(0), "unpin_blocks")
        self._verbs: dict[str, Callable[..., Ids | None]] = {
            "get": self._get,
            "grow": self._grow,
            "hint": self._hint,
            "free": self._free,
            "touch": self._touch,
            "hash": self._hash,
            "evict": self._evict,
            "unpin": self._unpin,
            "take_out": self._take_out,
            "reset_cache": self._reset_cache,
            "reset_order": self._reset_order,
        }

    def pool(self, p: int) -> Any:
        """On the native side."""
        return self._native.pools[p]

    def is_queued(self, p: int, block_id: int) -> bool:
        block = self.pool(p).blocks[block_id]
        return not block.is_null and block.ref_cnt == 0 and block_id not in self.gone[p]

    def do(self, operation: Operation) -> Ids | None:
        verb, p, *arguments = operation
        if p >= len(self.gone):
            return None
        try:
            return self._verbs[verb](p, *arguments)
        except Divergence as error:
            raise Divergence(f"{operation}: {error}") from None
        except Exception as error:
            raise Divergence(f"{operation}: {type(error).__name__}: {error}") from error

    def glance(self) -> None:
        for p, pool in enumerate(self._native.pools):
            broken = pool.free_block_queue.check()
            if broken:
                raise Divergence(f"check() says: {broken}")
            free = {side.pools[p].get_num_free_blocks() for side in self.sides}
            if len(free) > 1:
                raise Divergence(f"the pools have different numbers of free blocks: {free}")

    def look(self) -> None:
        self.glance()
        for p in range(len(self.gone)):
            native, theirs = (side.pools[p] for side in self.sides)
            order = pools.order(native)
            if pools.order(theirs) != order:
                raise Divergence(
                    f"the order is {order}, that of {self.setting.rival} {pools.order(theirs)}"
                )
            queued = {i for i in range(native.num_gpu_blocks) if self.is_queued(p, i)}
            if len(order) != len(queued) or set(order) != queued:
                raise Divergence(f"{order} are queued, {sorted(queued)} are free")
            for what in (_blocks_of, _cache_of):
                if what(native) != what(theirs):
                    raise Divergence(f"{what(native)}, not {what(theirs)}")
            reused = [side.reused[p] for side in self.sides]
            if reused[0] != reused[1]:
                raise Divergence(f"{reused[0]} were told to be reused, not {reused[1]}")
            if self.sides[1].is_strict:
                ours, wanted = (
                    pool.free_block_queue.stats() | {"implementation": ""}
                    for pool in (native, theirs)
                )
                if ours != wanted:
                    raise Divergence(f"stats() are {ours}, not {wanted}")

    def _everywhere(self, call: Callable[[Side], Any]) -> Any:
        """`call(side)` on each side; all must return the same, or find that there are too few."""
        told = []
        for side in self.sides:
            try:
                told.append(call(side))
            except ValueError:
                told.append(ValueError)
        if told[0] != told[1]:
            raise Divergence(f"{told[0]}, but {self.setting.rival} says {told[1]}")
        return told[0]

    def _got(self, taken: Any) -> Ids | None:
        return taken if isinstance(taken, list) else None

    def _get(self, p: int, n: int) -> Ids | None:
        taken = self._everywhere(lambda side: ids(side.pools[p].get_new_blocks(n)))
        if (taken is ValueError) != (n > self.pool(p).get_num_free_blocks() + _length(taken)):
            raise Divergence(f"{taken}, where {self.pool(p).get_num_free_blocks()} are left")
        if isinstance(taken, list) and len(set(taken)) != n:
            raise Divergence(f"{taken} are not {n}")
        return self._got(taken)

    def _grow(self, p: int, block_id: int, n: int) -> Ids | None:
        """As the plugin does it around vLLM's allocations."""
        self._hint(p, block_id)
        try:
            return self._get(p, n)
        finally:
            self._hint(p, None)

    def _hint(self, p: int, block_id: int | None) -> None:
        if block_id is not None and block_id >= self.setting.num_blocks[p]:
            return
        is_refused = block_id is not None and self.is_queued(p, block_id)
        for side in self.sides:
            if not side.is_strict:
                continue
            block = None if block_id is None else side.pools[p].blocks[block_id]
            try:
                side.pools[p].free_block_queue.grow_after(block)
            except RuntimeError:
                if not is_refused:
                    raise
            else:
                if is_refused:
                    raise Divergence(f"{side.name} grows after a free block")

    def _free(self, p: int, block_ids: Ids, others: Ids) -> None:
        """`others` are blocks of the other pool, freed with those of this one."""
        held = self._held(p, block_ids)
        theirs = self._held(1 - p, others) if len(self.gone) > 1 else []
        for side in self.sides:
            blocks = side.blocks(p, held)
            if theirs:
                blocks += side.blocks(1 - p, theirs)
            side.pools[p].free_blocks(blocks)

    def _held(self, p: int, block_ids: Ids) -> Ids:
        """As many of them, one by one, as there are references."""
        blocks = self.pool(p).blocks
        held: Ids = []
        taken: dict[int, int] = {}
        for block_id in block_ids:
            if block_id >= len(blocks):
                continue
            taken[block_id] = taken.get(block_id, 0) + 1
            if blocks[block_id].is_null or taken[block_id] <= blocks[block_id].ref_cnt:
                held.append(block_id)
        return held

    def _touch(self, p: int, block_ids: Ids) -> Ids:
        gone = self.gone[p]
        known = [i for i in block_ids if i < self.setting.num_blocks[p] and i not in gone]
        for side in self.sides:
            side.pools[p].touch(side.blocks(p, known))
        return known

    def _hash(self, p: int, block_id: int, value: int) -> None:
        if not self.setting.caching or block_id >= self.setting.num_blocks[p]:
            return
        block = self.pool(p).blocks[block_id]
        if block.is_null or block.ref_cnt == 0 or block.block_hash is not None:
            return
        for side in self.sides:
            pools.give_hash(side.pools[p], side.pools[p].blocks[block_id], value)

    def _evict(self, p: int, block_ids: Ids) -> None:
        known = {i for i in block_ids if i < self.setting.num_blocks[p]}
        for side in self.sides:
            side.pools[p].evict_blocks(known)

    def _unpin(self, p: int, block_ids: Ids) -> None:
        held = [i for i in self._held(p, block_ids) if i]
        if not self.can_unpin:
            return
        for side in self.sides:
            reused = side.reused[p]
            side.pools[p].unpin_blocks(
                side.blocks(p, held), lambda block, to=reused: to.append(block.block_id)
            )

    def _take_out(self, p: int, block_id: int) -> None:
        """For good."""
        if block_id >= self.setting.num_blocks[p] or not self.is_queued(p, block_id):
            return
        for side in self.sides:
            pool = side.pools[p]
            pool.free_block_queue.remove(pool.blocks[block_id])
        self.gone[p].add(block_id)

    def _reset_cache(self, p: int) -> None:
        """The queue reads no hashes, and is told."""
        if self._everywhere(lambda side: side.pools[p].reset_prefix_cache()):
            for side in self.sides:
                if side.is_strict:
                    side.pools[p].free_block_queue.forget_hashes()

    def _reset_order(self, p: int) -> None:
        self._everywhere(lambda side: _reset_order(side.pools[p]))


def _length(taken: Any) -> int:
    return len(taken) if isinstance(taken, list) else 0


def _blocks_of(pool: Any) -> list[Any]:
    return [(b.block_id, b.ref_cnt, b.block_hash, b.is_null) for b in pool.blocks]


def _cache_of(pool: Any) -> dict[Any, Any]:
    cache = pool.cached_block_hash_to_block._cache
    return {
        key: list(found) if isinstance(found, dict) else found.block_id
        for key, found in cache.items()
    }


def _reset_order(pool: Any) -> int:
    """The plugin's reset; for the specification, which it does not know, in its own words."""
    queue = pool.free_block_queue
    if not isinstance(queue, PatientReference):
        return reset_order([pool])
    in_use = blocks_in_use(pool)
    if not in_use:
        watched = getattr(pool, "_reuse_watchers", {})
        last = [block for block in queue.get_all_free_blocks() if block.block_id in watched]
        queue.reorder()
        for block in last:
            queue.remove(block)
            queue.append(block)
    return in_use


class PoolPlayer:
    """Plays requests with prefixes: they hit, compute, grow, slide, are freed; some are unpinned.

    `tables` hold a reference to each of their blocks; a block may be in several of them.
    """

    def __init__(self, chance: Random, scene: PoolScene, do: Do) -> None:
        self._chance = chance
        self._scene = scene
        self._do = do
        self._size = scene.setting.size
        self._counts = scene.setting.num_blocks
        # Short tables leave many extents over that are free in part.
        self._most = pick(chance, (scene.setting.num_ids, 2 * self._size))
        self._tables: list[list[Ids]] = [[] for _ in self._counts]
        self._values = pick(chance, (4, 50, 10**6))
        take: list[Callable[[int], None]] = [self._admit, self._grow, self._grow]
        give: list[Callable[[int], None]] = [self._finish, self._finish, self._slide, self._preempt]
        more = [self._compute, self._compute, self._hit, self._hit]
        full = pick(chance, (1, 2, 3, 4))
        rare = [self._too_many, self._hint, self._evict, self._evict, self._reset]
        if scene.can_unpin and chance.random() < 0.5:
            rare += [self._unpin, self._unpin]
        if chance.random() < 0.1:
            rare.append(self._take_out)
        empties = [[], [self._empty]]
        self._actions = (take * full + give * 2 + more) * 3 + rare + pick(chance, empties)

    def play(self) -> None:
        pick(self._chance, self._actions)(below(self._chance, len(self._counts)))

    def _some_id(self, p: int) -> int:
        return below(self._chance, self._counts[p])

    def _free_blocks(self, p: int) -> int:
        count: int = self._scene.pool(p).get_num_free_blocks()
        return count

    def _admit(self, p: int) -> None:
        free = self._free_blocks(p)
        if free:
            taken = self._do(["get", p, some(self._chance, min(free, self._most), self._size)])
            if taken:
                self._tables[p].append(taken)

    def _grow(self, p: int) -> None:
        free = self._free_blocks(p)
        table = pick(self._chance, self._tables[p]) if self._tables[p] else None
        if free and table:
            n = (
                1
                if self._chance.random() < 0.6
                else some(self._chance, min(free, self._most), self._size)
            )
            table += self._do(["grow", p, table[-1], n]) or []

    def _hint(self, p: int) -> None:
        """Left standing, whatever becomes of the block."""
        self._do(["hint", p, self._some_id(p) if self._chance.random() < 0.7 else None])

    def _compute(self, p: int) -> None:
        """Some blocks of a table are full and get hashes."""
        if self._scene.setting.caching and self._tables[p]:
            for block_id in pick(self._chance, self._tables[p])[: 1 + below(self._chance, 8)]:
                self._do(["hash", p, block_id, below(self._chance, self._values)])

    def _hit(self, p: int) -> None:
        chosen = [self._some_id(p) for _ in range(pick(self._chance, (1, 1, 2, 5)))]
        self._tables[p].append(self._do(["touch", p, chosen]))

    def _pop_table(self, p: int) -> Ids:
        tables = self._tables[p]
        if not tables:
            return []
        at = below(self._chance, len(tables))
        table, tables[at] = tables[at], tables[-1]
        tables.pop()
        return table

    def _finish(self, p: int) -> None:
        others: Ids = []
        if len(self._counts) > 1 and self._chance.random() < 0.3:
            others = self._pop_table(1 - p)[::-1]
        table = self._pop_table(p)[::-1]
        if self._chance.random() < 0.1:
            table.insert(below(self._chance, len(table) + 1), 0)
        if table or others:
            self._do(["free", p, table, others])

    def _preempt(self, p: int) -> None:
        """Several requests go one after the other."""
        for _ in range(below(self._chance, 4)):
            self._finish(p)

    def _slide(self, p: int) -> None:
        if self._tables[p] and (table := pick(self._chance, self._tables[p])):
            n = 1 + below(self._chance, len(table))
            gone = table[:n]
            del table[:n]
            self._do(["free", p, gone, []])

    def _empty(self, p: int) -> None:
        """Everything is freed, and the cache or the order is reset."""
        if self._chance.random() < 0.5:
            while self._tables[p]:
                self._do(["free", p, self._pop_table(p)[::-1], []])
        self._reset(p)

    def _reset(self, p: int) -> None:
        self._do([pick(self._chance, ("reset_cache", "reset_order")), p])

    def _evict(self, p: int) -> None:
        self._do(["evict", p, [self._some_id(p) for _ in range(1 + below(self._chance, 6))]])

    def _unpin(self, p: int) -> None:
        table = self._pop_table(p)
        if table:
            self._do(["unpin", p, table])

    def _take_out(self, p: int) -> None:
        if self._chance.random() < 0.2:
            self._do(["take_out", p, self._some_id(p)])

    def _too_many(self, p: int) -> None:
        self._do(["get", p, self._free_blocks(p) + pick(self._chance, (1, 2, 10**6))])


def player(chance: Random, scene: PoolScene, do: Do) -> PoolPlayer:
    return PoolPlayer(chance, scene, do)


def random_setting(chance: Random, policy: str) -> PoolSetting:
    def count() -> int:
        kind = chance.random()
        if kind < 0.85:
            return chance.randint(1, 49)
        return chance.randint(50, 1500 if policy == "lru" and kind > 0.95 else 300)

    return PoolSetting(
        policy=policy,
        size=chance.choice(SIZES) if policy == "extent" else 8,
        pack_tails=policy == "extent" and chance.random() < 0.5,
        rival="vllm" if policy == "lru" else "reference",
        caching=chance.random() < 0.7,
        num_blocks=[count() for _ in range(chance.choice((1, 1, 2)))],
    )
