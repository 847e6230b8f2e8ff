"""Queues side by side: the native one, vLLM's class and the specification.

Blocks in arguments are ids, or one of these, which have no place in the queue:

    "stranger 3"    another block with the id of one that the queue knows
    "other 3"       block 3 of the other queue
    "head", "tail"  the fake ends of the queue
    "object"        no block at all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from implementations import BLOCKS, HAS_VLLM, QUEUES, ids, walk
from patient_reference import PatientReference
from scenes import SIZES, Divergence, Do, Ids, Operation, below, pick, some

SIDES: dict[str, Any] = QUEUES | {"reference": PatientReference}
HAVE_PREPEND = hasattr(SIDES.get("vllm", PatientReference), "prepend_n")
WALKS = 4


def _brief(block_class: Any) -> Any:
    """The links of a block lead to all others, and with the `repr` of a dataclass so does that."""
    members = {"__slots__": (), "__repr__": lambda block: f"<block {block.block_id}>"}
    return type(block_class.__name__, (block_class,), members)


BRIEF_BLOCKS = {name: _brief(block_class) for name, block_class in BLOCKS.items()}


@dataclass(frozen=True)
class QueueSetting:
    """Queues of one policy.

    Attributes:
        policy, size, pack_tails: as for `FreeBlockQueue`.
        blocks: kind of the blocks, a key of `implementations.BLOCKS`.
        rivals: what the native queue is compared with, keys of `SIDES`.
        num_ids: block ids are below this.
        orders: for each queue the ids of the blocks that it is built from.
    """

    kind: ClassVar[str] = "queue"

    policy: str
    size: int
    pack_tails: bool
    blocks: str
    rivals: list[str]
    num_ids: int
    orders: list[Ids]

    def scene(self) -> QueueScene:
        return QueueScene(self)

    def simpler(self) -> Iterator[QueueSetting]:
        for fewer in (self.num_ids // 2, max(0, self.num_ids - 1)):
            orders = [[i for i in order if i < fewer] for order in self.orders]
            yield replace(self, num_ids=fewer, orders=orders)
        if len(self.orders) > 1:
            yield replace(self, orders=self.orders[:1])
        yield replace(self, orders=[list(range(self.num_ids)) for _ in self.orders])
        yield replace(self, orders=[sorted(order) for order in self.orders])
        for block_id in range(min(self.num_ids, 64)):
            orders = [[i for i in order if i != block_id] for order in self.orders]
            if orders != self.orders:
                yield replace(self, orders=orders)
        yield replace(self, blocks="slots")
        yield replace(self, pack_tails=False)
        if len(self.rivals) > 1:
            for rival in self.rivals:
                yield replace(self, rivals=[rival])


@dataclass
class Side:
    name: str
    queues: list[Any]
    blocks: list[list[Any]]
    strangers: list[Any]
    walks: list[Any]

    @property
    def is_strict(self) -> bool:
        """Whether it refuses mistakes, where vLLM's class corrupts itself."""
        return self.name != "vllm"

    def block(self, q: int, named: int | str) -> Any:
        if isinstance(named, int):
            return self.blocks[q][named]
        kind, _, number = named.partition(" ")
        if kind == "stranger":
            return self.strangers[int(number)]
        if kind == "other":
            if isinstance(self.queues[1 - q], PatientReference):
                self.queues[1 - q].look()  # it is told by its links whether it is queued there
            return self.blocks[1 - q][int(number)]
        if kind in ("head", "tail"):
            return getattr(self.queues[q], f"fake_free_list_{kind}")
        return object()


class QueueScene:
    """See scenes.py. The first side is the native one."""

    def __init__(self, setting: QueueSetting) -> None:
        self.setting = setting
        self.sides = [self._side(name) for name in ("native", *setting.rivals)]
        self.free = [set(order) for order in setting.orders]
        # The ids that a queue knows: it may be told of others later.
        self.seen = [set(order) for order in setting.orders]
        self._all_ids = set(range(setting.num_ids))
        self._native = self.sides[0]
        self._verbs: dict[str, Callable[..., Ids | None]] = {
            "popleft": self._popleft,
            "popleft_n": self._popleft_n,
            "remove": self._remove,
            "append": self._append,
            "append_n": self._append_n,
            "prepend_n": self._prepend_n,
            "grow_after": self._grow_after,
            "forget_hashes": self._forget_hashes,
            "reorder": self._reorder,
            "rebuild": self._rebuild,
            "pretend": self._pretend,
            "cut": self._cut,
            "detour": self._detour,
            "begin_walk": self._begin_walk,
            "step_walk": self._step_walk,
        }

    def do(self, operation: Operation) -> Ids | None:
        verb, q, *arguments = operation
        if q >= len(self.free):
            return None
        try:
            return self._verbs[verb](q, *arguments)
        except Divergence as error:
            raise Divergence(f"{operation}: {error}") from None
        except Exception as error:
            raise Divergence(f"{operation}: {type(error).__name__}: {error}") from error

    def glance(self) -> None:
        for q, queue in enumerate(self._native.queues):
            if queue.num_free_blocks != len(self.free[q]):
                raise Divergence(f"{queue.num_free_blocks} blocks are free, not {self.free[q]}")
            broken = queue.check()
            if broken:
                raise Divergence(f"check() says: {broken}")

    def look(self) -> None:
        self.glance()
        for q in range(len(self.free)):
            self._look_at(q)

    def _look_at(self, q: int) -> None:
        native = self._native.queues[q]
        order = ids(native.get_all_free_blocks())
        if len(order) != len(self.free[q]) or set(order) != self.free[q]:
            raise Divergence(f"{order} are queued, {sorted(self.free[q])} are free")
        if walk(native) != order or ids(native.iter_blocks_after(None)) != order:
            raise Divergence(f"links or walk are not those of {order}")
        for block_id in self._all_ids - self.free[q]:
            block = self._native.blocks[q][block_id]
            if block.prev_free_block is not None or block.next_free_block is not None:
                raise Divergence(f"block {block_id} is in use but has links")
        for side in self.sides[1:]:
            rival = side.queues[q]
            theirs = ids(rival.get_all_free_blocks())
            if theirs != order:
                raise Divergence(f"the order is {order}, that of {side.name} {theirs}")
            if rival.num_free_blocks != len(order):
                raise Divergence(f"{side.name} counts {rival.num_free_blocks} of {len(order)}")
            if side.is_strict:
                ours, wanted = (one.stats() | {"implementation": ""} for one in (native, rival))
                if ours != wanted:
                    raise Divergence(f"stats() are {ours}, not {wanted}")

    def _side(self, name: str) -> Side:
        setting = self.setting
        block_class = BRIEF_BLOCKS[setting.blocks]
        blocks = [[block_class(i) for i in range(setting.num_ids)] for _ in setting.orders]
        queues = [
            self._queue(name, [mine[i] for i in order])
            for mine, order in zip(blocks, setting.orders, strict=True)
        ]
        strangers = [block_class(i) for i in range(setting.num_ids)]
        return Side(name, queues, blocks, strangers, walks=[None] * WALKS)

    def _queue(self, name: str, blocks: list[Any]) -> Any:
        if name == "vllm":
            return SIDES[name](blocks)
        setting = self.setting
        return SIDES[name](blocks, setting.policy, setting.size, setting.pack_tails)

    def _everywhere(self, q: int, call: Callable[[Any, Any], Any]) -> Any:
        """`call(queue, blocks)` on each side; all must return the same."""
        told = [call(side.queues[q], side.blocks[q]) for side in self.sides]
        for side, theirs in zip(self.sides, told, strict=True):
            if theirs != told[0]:
                raise Divergence(f"{told[0]}, but {side.name} says {theirs}")
        return told[0]

    def _refused(
        self, q: int, call: Callable[[Any, Side], Any], *errors: type[Exception], by_vllm: bool
    ) -> None:
        """`call(queue, side)` must raise one of the errors, and the same on each side."""
        told: set[type[Exception]] = set()
        for side in self.sides:
            if not (by_vllm or side.is_strict):
                continue
            try:
                answer = call(side.queues[q], side)
            except errors as error:
                told.add(type(error))
            else:
                raise Divergence(f"{side.name} does not refuse, but says {answer!r}")
        if len(told) > 1:
            raise Divergence(f"refused with different errors: {told}")

    def _popleft(self, q: int) -> Ids | None:
        if not self.free[q]:
            self._refused(q, lambda queue, _: queue.popleft(), ValueError, by_vllm=True)
            return None
        return self._took(q, [self._everywhere(q, lambda queue, _: queue.popleft().block_id)])

    def _popleft_n(self, q: int, n: int) -> Ids | None:
        if not 0 <= n <= len(self.free[q]):
            error = ValueError if n < 0 else AssertionError
            self._refused(q, lambda queue, _: queue.popleft_n(n), error, by_vllm=n > 0)
            return None
        taken = self._everywhere(q, lambda queue, _: ids(queue.popleft_n(n)))
        if len(taken) != n:
            raise Divergence(f"{taken} are not {n}")
        return self._took(q, taken)

    def _took(self, q: int, taken: Ids) -> Ids:
        left = len(self.free[q]) - len(taken)
        self.free[q].difference_update(taken)
        if len(self.free[q]) != left:
            raise Divergence(f"{taken} were not all free")
        return taken

    def _remove(self, q: int, named: int | str) -> Ids | None:
        if named in self.free[q]:
            self._everywhere(q, lambda queue, blocks: queue.remove(blocks[named]))
            return self._took(q, [int(named)])
        if not self._is_known(named):
            return None
        self._refused(
            q,
            lambda queue, side: queue.remove(side.block(q, named)),
            RuntimeError,
            by_vllm=isinstance(named, int),
        )
        return None

    def _append(self, q: int, named: int | str) -> None:
        self._insert(q, "append", [named], lambda blocks: blocks[0])

    def _append_n(self, q: int, names: list[Any]) -> None:
        self._insert(q, "append_n", names, list)

    def _prepend_n(self, q: int, names: list[Any]) -> None:
        self._insert(q, "prepend_n", names, list)

    def _insert(
        self, q: int, verb: str, names: list[Any], argument: Callable[[list[Any]], Any]
    ) -> None:
        chosen = set(names)
        if (
            len(chosen) == len(names)
            and chosen <= self._all_ids
            and chosen.isdisjoint(self.free[q])
        ):
            self._everywhere(
                q,
                lambda queue, blocks: getattr(queue, verb)(argument([blocks[i] for i in names])),
            )
            self.free[q] |= chosen
            self.seen[q] |= chosen
        elif all(map(self._is_known, names)) and self._has_mistake(q, names):
            self._refused(
                q,
                lambda queue, side: getattr(queue, verb)(
                    argument([side.block(q, named) for named in names])
                ),
                RuntimeError,
                TypeError,
                by_vllm=False,
            )

    def _is_known(self, named: int | str) -> bool:
        if isinstance(named, int):
            return named in self._all_ids
        kind, _, number = named.partition(" ")
        if not number:
            return True
        return int(number) in self._all_ids and (kind == "stranger" or len(self.free) > 1)

    def _has_mistake(self, q: int, names: list[Any]) -> bool:
        """A stranger whose id the queue does not know yet is none: it would be welcome."""
        if len(set(names)) < len(names):
            return True
        for named in names:
            kind, _, number = str(named).partition(" ")
            if not number:
                if isinstance(named, str) or named in self.free[q]:
                    return True
            elif int(number) in self.seen[q] | (self.free[1 - q] if kind == "other" else set()):
                return True
        return False

    def _grow_after(self, q: int, named: int | str | None) -> None:
        if named is not None and not self._is_known(named):
            return
        if named is None or (named in self.seen[q] and named not in self.free[q]):
            for side in self.sides:
                if side.is_strict:
                    block = None if named is None else side.block(q, named)
                    side.queues[q].grow_after(block)
        else:
            self._refused(
                q,
                lambda queue, side: queue.grow_after(side.block(q, named)),
                RuntimeError,
                by_vllm=False,
            )

    def _detour(self, q: int, block_id: int) -> None:
        """A block in use goes through another queue, and is in use again."""
        if block_id not in self.seen[q] - self.free[q]:
            return
        for side in self.sides:
            queue, block = side.queues[q], side.block(q, block_id)
            elsewhere = self._queue(side.name, [block])
            if isinstance(elsewhere, PatientReference):
                elsewhere.look()
            for call in (queue.grow_after, queue.append) if side.is_strict else ():
                try:
                    call(block)
                except RuntimeError:
                    continue
                raise Divergence(f"{side.name} takes block {block_id} from another queue")
            if elsewhere.popleft() is not block:
                raise Divergence(f"{side.name} hands out another block")

    def _forget_hashes(self, q: int) -> None:
        for side in self.sides:
            if side.is_strict:
                side.queues[q].forget_hashes()

    def _reorder(self, q: int) -> None:
        """vLLM's class has no such call: take all out and put them back in id order."""
        for side in self.sides:
            queue = side.queues[q]
            if side.is_strict:
                queue.reorder()
            else:
                queue.popleft_n(len(self.free[q]))
                queue.append_n([side.blocks[q][i] for i in sorted(self.free[q])])

    def _rebuild(self, q: int) -> None:
        """A new queue of the blocks that are free, from last to first; they leave the old one."""
        for side in self.sides:
            old = side.queues[q]
            blocks = old.get_all_free_blocks()[::-1]
            if isinstance(old, PatientReference):
                old.popleft_n(len(blocks))  # its links, by which it would know, are not kept
            side.queues[q] = self._queue(side.name, blocks)
            side.walks = [None] * WALKS
            if side.name == "native" and (old.num_free_blocks or old.check()):
                raise Divergence(f"the old queue is left with {old!r}: {old.check()}")
        self.seen[q] = set(self.free[q])

    def _pretend(self, q: int, count: int, n: int) -> None:
        """`num_free_blocks` is set to `count`, as vLLM's own tests do to make a pool look full.

        To make it look fuller than it is: only ours, as vLLM's class would hand out an end.
        """
        free = len(self.free[q])
        looks_full = 0 <= count < n
        refusal = AssertionError if looks_full else RuntimeError
        if not (looks_full or free < n <= count):
            return
        for side in self.sides:
            if not (looks_full or side.is_strict):
                continue
            queue = side.queues[q]
            queue.num_free_blocks = count
            try:
                queue.popleft_n(n)
            except refusal:
                queue.num_free_blocks = free
            else:
                raise Divergence(f"{side.name} hands out {n} blocks where {count} are free")

    def _cut(self, q: int, end: str) -> None:
        """The list is cut off from one of its ends, as vLLM's own tests do, and joined again.

        Only ours: vLLM's class has counted down by the time it refuses.
        """
        link = {"head": "next_free_block", "tail": "prev_free_block"}[end]
        in_use = min(self.seen[q] - self.free[q], default=None)
        calls: list[Callable[[Any, Side], Any]] = []
        if end == "head":
            calls += [
                lambda queue, _: queue.popleft(),
                lambda queue, _: queue.popleft_n(max(1, len(self.free[q]))),
                lambda queue, _: queue.get_all_free_blocks(),
            ]
            if in_use is not None:
                calls.append(lambda queue, side: queue.prepend_n([side.block(q, in_use)]))
        elif in_use is not None:
            calls += [
                lambda queue, side: queue.append(side.block(q, in_use)),
                lambda queue, side: queue.append_n([side.block(q, in_use)]),
            ]
        strict = [side.queues[q] for side in self.sides if side.is_strict]
        joined = []
        for queue in strict:
            if isinstance(queue, PatientReference):
                queue.look()
            fake = getattr(queue, f"fake_free_list_{end}")
            joined.append(getattr(fake, link))
            setattr(fake, link, None)
        for call in calls:
            self._refused(q, call, AssertionError, RuntimeError, ValueError, by_vllm=False)
        if any(queue.check() != "an end of the list was cut off from outside" for queue in strict):
            raise Divergence(f"check() does not say that the {end} was cut off")
        for queue, block in zip(strict, joined, strict=True):
            setattr(getattr(queue, f"fake_free_list_{end}"), link, block)

    def _begin_walk(self, q: int, number: int, cursor: int | None) -> None:
        if cursor is not None and not self._is_known(cursor):
            return
        for side in self.sides:
            block = None if cursor is None else side.block(q, cursor)
            side.walks[number % WALKS] = side.queues[q].iter_blocks_after(block)

    def _step_walk(self, _q: int, number: int) -> None:
        """Walks begun at any time, continued after any changes, see the same blocks."""
        seen = {}
        for side in self.sides:
            walk = side.walks[number % WALKS]
            if walk is not None:
                seen[side.name] = getattr(next(walk, None), "block_id", None)
        if len(set(seen.values())) > 1:
            raise Divergence(f"walks see different blocks: {seen}")


class QueuePlayer:
    """Plays an engine that allocates, grows, frees and hits, and makes mistakes on the way.

    `tables` are block tables as an engine holds them: they grow at their end, and are freed tail
    first, the head with hashes. `cached` is what was freed with a hash, long gone ids included.
    """

    def __init__(self, chance: Random, scene: QueueScene, do: Do) -> None:
        self._chance = chance
        self._scene = scene
        self._do = do
        self._size = scene.setting.size
        self._ids = scene.setting.num_ids
        # Where nearly all is cached, what is free has to be found among it.
        self._caches_all = chance.random() < 0.3
        # Short tables leave many extents over that are free in part.
        self._most = pick(chance, (self._ids, self._ids, 2 * self._size))
        self._tables: list[list[Ids]] = [
            [[i] for i in range(self._ids) if i not in free] for free in scene.free
        ]
        self._cached: list[Ids] = [[] for _ in scene.free]
        grow = self._grow if scene.setting.policy == "extent" else self._pop
        # `full` says how full the pool is kept: whoever takes more than is given back runs out.
        take: list[Callable[[int], None]] = [self._admit, self._pop, grow, grow]
        give: list[Callable[[int], None]] = [self._finish, self._finish, self._slide, self._hit]
        full = pick(chance, (1, 2, 3, 3, 4))
        usual = (take * full + give * 3) * 3
        rare = [
            self._mistake,
            self._mistake,
            self._too_many,
            self._stale_hint,
            self._detour,
            self._walk,
            self._walk,
            self._pretend,
            self._cut,
        ]
        reset = [[], [self._reset], [self._reset, self._rebuild]]
        self._actions = usual + rare + pick(chance, reset)

    def play(self) -> None:
        q = below(self._chance, len(self._scene.free))
        pick(self._chance, self._actions)(q)

    def _admit(self, q: int) -> None:
        free = len(self._scene.free[q])
        if free:
            n = some(self._chance, min(free, self._most), self._size)
            taken = self._do(["popleft_n", q, n])
            self._tables[q].append(taken)

    def _pop(self, q: int) -> None:
        taken = self._do(["popleft", q])
        if taken:
            self._tables[q].append(taken)

    def _grow(self, q: int) -> None:
        free = len(self._scene.free[q])
        table = pick(self._chance, self._tables[q]) if self._tables[q] else None
        if not free or not table:
            return
        self._do(["grow_after", q, table[-1]])
        for _ in range(pick(self._chance, (1, 1, 2, 5))):
            n = some(self._chance, min(len(self._scene.free[q]), self._most), self._size)
            taken = self._do(["popleft_n", q, n] if self._chance.random() < 0.7 else ["popleft", q])
            if taken:
                table += taken
        if self._chance.random() < 0.9:
            self._do(["grow_after", q, None])

    def _stale_hint(self, q: int) -> None:
        """Left standing, whatever becomes of the block."""
        self._do(["grow_after", q, below(self._chance, self._ids)])

    def _detour(self, q: int) -> None:
        if self._tables[q] and (table := pick(self._chance, self._tables[q])):
            self._do(["detour", q, table[-1]])
            self._do(["grow_after", q, pick(self._chance, (table[-1], None))])

    def _finish(self, q: int) -> None:
        tables = self._tables[q]
        if not tables:
            return
        at = below(self._chance, len(tables))
        table, tables[at] = tables[at], tables[-1]
        tables.pop()
        hashed = pick(self._chance, (0, len(table), below(self._chance, len(table) + 1)))
        if self._caches_all:
            hashed = max(0, len(table) - below(self._chance, 3))
        self._free(q, table[hashed:][::-1], table[:hashed][::-1])

    def _slide(self, q: int) -> None:
        """A sliding window frees the first blocks of a request that goes on."""
        if self._tables[q] and (table := pick(self._chance, self._tables[q])):
            n = 1 + below(self._chance, len(table))
            gone = table[:n]
            del table[:n]
            if self._chance.random() < 0.5:
                self._free(q, gone, [])
            else:
                self._free(q, [], gone)

    def _free(self, q: int, lost: Ids, kept: Ids) -> None:
        verb = "prepend_n" if HAVE_PREPEND else "append_n"
        if lost or self._chance.random() < 0.05:
            self._do([verb, q, lost])
        if len(kept) < 4 and self._chance.random() < 0.5:
            for block_id in kept:
                self._do(["append", q, block_id])
        elif kept:
            self._do(["append_n", q, kept])
        self._cached[q] += kept

    def _hit(self, q: int) -> None:
        """Cached blocks are touched, in the middle of an extent too."""
        cached, free = self._cached[q], self._scene.free[q]
        table: Ids = []
        for _ in range(pick(self._chance, (1, 1, 3, 8))):
            if not cached:
                break
            at = below(self._chance, len(cached))
            block_id, cached[at] = cached[at], cached[-1]
            cached.pop()
            if block_id in free:
                self._do(["remove", q, block_id])
                table.append(block_id)
        if table:
            self._tables[q].append(table)

    def _reset(self, q: int) -> None:
        self._do([pick(self._chance, ("forget_hashes", "reorder")), q])

    def _rebuild(self, q: int) -> None:
        if self._chance.random() < 0.2:
            self._do(["rebuild", q])

    def _too_many(self, q: int) -> None:
        more = pick(self._chance, (1, 2, 10**6))
        n = -more if self._chance.random() < 0.3 else len(self._scene.free[q]) + more
        self._do(["popleft_n", q, n])

    def _pretend(self, q: int) -> None:
        count = below(self._chance, 3)
        n = count + 1 + below(self._chance, self._ids)
        if self._chance.random() < 0.3:
            n = len(self._scene.free[q]) + 1 + below(self._chance, 3)
            count = n + below(self._chance, 3)
        self._do(["pretend", q, count, n])

    def _cut(self, q: int) -> None:
        self._do(["cut", q, pick(self._chance, ("head", "tail"))])

    def _mistake(self, q: int) -> None:
        """The rest of the batch is fine."""
        named = pick(
            self._chance,
            (
                below(self._chance, self._ids),
                f"stranger {below(self._chance, self._ids)}",
                f"other {below(self._chance, self._ids)}",
                "head",
                "tail",
                "object",
            ),
        )
        verb = pick(self._chance, ("append", "append_n", "prepend_n", "remove", "grow_after"))
        if verb not in ("append_n", "prepend_n"):
            if isinstance(named, int) and named not in self._scene.free[q] and verb == "append":
                return  # no mistake
            self._do([verb, q, named])
            return
        batch: list[Any] = []
        if self._tables[q]:
            batch += pick(self._chance, self._tables[q])
        if isinstance(named, int) and named not in self._scene.free[q]:
            if not batch:
                return
            named = pick(self._chance, batch)  # twice
        batch.insert(below(self._chance, len(batch) + 1), named)
        self._do([verb, q, batch])

    def _walk(self, q: int) -> None:
        number = below(self._chance, WALKS)
        if self._chance.random() < 0.3:
            cursor = None if self._chance.random() < 0.5 else below(self._chance, self._ids)
            self._do(["begin_walk", q, number, cursor])
        self._do(["step_walk", q, number])


def player(chance: Random, scene: QueueScene, do: Do) -> QueuePlayer:
    return QueuePlayer(chance, scene, do)


def random_setting(chance: Random, policy: str) -> QueueSetting:
    kind = chance.random()
    # The specification takes its time with many blocks, vLLM's class does not.
    if kind < 0.8:
        num_ids = chance.randint(1, 48)
    elif kind < 0.96 or policy == "lru":
        num_ids = chance.randint(49, 300)
    else:
        num_ids = chance.randint(301, 700)
    if policy == "lru" and kind >= 0.98:
        num_ids = chance.randint(1000, 5000)
    rivals = ["reference"]
    if policy == "lru" and HAS_VLLM:
        rivals = ["vllm", "reference"] if num_ids < 50 and chance.random() < 0.1 else ["vllm"]
    orders = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        order = list(range(num_ids))
        if chance.random() < 0.5:
            chance.shuffle(order)
        if chance.random() < 0.5:
            del order[chance.randint(0, num_ids) :]
        orders.append(order)
    return QueueSetting(
        policy=policy,
        size=chance.choice(SIZES) if policy == "extent" else 8,
        pack_tails=policy == "extent" and chance.random() < 0.5,
        blocks=chance.choice(["slots", "slots", *sorted(BLOCKS)]),
        rivals=rivals,
        num_ids=num_ids,
        orders=orders,
    )
