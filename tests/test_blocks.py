"""Classes of blocks and their links: served, shared with other queues, and hostile ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from abc import ABCMeta
from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest
from implementations import QUEUES, DictBlock, SlotBlock, assert_order, ids, walk

from pyblockpool import FreeBlockQueue, reference
from pyblockpool._queue import (
    FreeListEnd,
    can_serve_links,
    serve_links,
    withdraw_links,
)


@pytest.fixture
def fresh_class() -> Any:
    """A class of blocks that no queue has seen."""

    @dataclass(slots=True)
    class Fresh:
        block_id: int
        prev_free_block: Any = None
        next_free_block: Any = None

    return Fresh


def test_serving_and_withdrawing_links(fresh_class: Any) -> None:
    stored = dict(vars(fresh_class))
    queue = FreeBlockQueue([fresh_class(0)])
    assert vars(fresh_class)["prev_free_block"] is not stored["prev_free_block"]
    serve_links(fresh_class)  # a second time changes nothing
    with pytest.raises(RuntimeError, match="1 native queues still have blocks"):
        withdraw_links(fresh_class)
    assert walk(queue) == [0]
    del queue
    gc.collect()
    withdraw_links(fresh_class)
    withdraw_links(fresh_class)
    assert dict(vars(fresh_class)) == stored
    block = fresh_class(1)
    block.next_free_block = "as before"
    assert block.next_free_block == "as before"


def test_a_class_without_defaults_gets_its_attributes_deleted_again() -> None:
    class Plain:
        def __init__(self, block_id: int) -> None:
            self.block_id = block_id
            self.prev_free_block = self.next_free_block = None

    queue = FreeBlockQueue([Plain(0), Plain(1)])
    assert_order(queue, [0, 1])
    del queue
    gc.collect()
    withdraw_links(Plain)
    assert "prev_free_block" not in vars(Plain)


@pytest.mark.parametrize("thing", [int, "no class", object()])
def test_links_of_something_else_are_refused(thing: Any) -> None:
    with pytest.raises(TypeError):
        serve_links(thing)


def test_links_that_are_properties_are_refused() -> None:
    class Propertied:
        block_id = 3
        prev_free_block = property(lambda self: None)
        next_free_block = property(lambda self: None)

    with pytest.raises(TypeError, match="Propertied is not a KV-cache block"):
        FreeBlockQueue([Propertied()])
    assert isinstance(vars(Propertied)["next_free_block"], property)


def test_a_class_that_cannot_be_changed_is_refused() -> None:
    with pytest.raises(TypeError):
        serve_links(FreeListEnd)


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
@pytest.mark.parametrize("other", sorted(set(QUEUES) - {"native"}))
def test_a_queue_in_python_beside_ours_still_works(block_class: Any, other: str) -> None:
    serve_links(block_class)
    theirs = QUEUES[other]([block_class(i) for i in range(10, 13)])
    ours = FreeBlockQueue([block_class(i) for i in range(4)])
    assert (walk(theirs), walk(ours)) == ([10, 11, 12], [0, 1, 2, 3])
    taken = ours.popleft_n(2)
    theirs.popleft_n(3)
    theirs.append_n(taken)  # blocks may change sides while they are in no queue
    assert walk(theirs) == [0, 1]
    with pytest.raises(RuntimeError, match="block 0 is queued in another queue"):
        ours.append(taken[0])
    ours.append_n(theirs.popleft_n(2))
    assert_order(ours, [2, 3, 0, 1])


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_a_queue_in_python_cannot_take_queued_blocks(block_class: Any) -> None:
    made = [block_class(i) for i in range(4)]
    queue = FreeBlockQueue(made)
    with pytest.raises(RuntimeError, match="links of block 0 are those of the native queue"):
        made[0].next_free_block = made[2]
    made[0].next_free_block = made[1]  # what it is anyhow
    assert_order(queue, [0, 1, 2, 3])


def test_a_queue_takes_blocks_over_from_a_queue_in_python() -> None:
    made = [SlotBlock(i) for i in range(4)]
    assert_order(FreeBlockQueue(reference.FreeBlockQueue(made).get_all_free_blocks()), [0, 1, 2, 3])


def test_blocks_move_between_native_queues() -> None:
    made = [SlotBlock(i) for i in range(3)]
    one, other = FreeBlockQueue(made), FreeBlockQueue([])
    other.append(one.popleft())
    with pytest.raises(RuntimeError, match="block 0 is queued in another queue"):
        one.append(made[0])
    one.append(other.popleft())
    assert_order(one, [1, 2, 0])
    assert_order(other, [])


def test_blocks_of_a_subclass() -> None:
    class Wider(SlotBlock):
        pass

    made: list[Any] = [SlotBlock(0), Wider(1), Wider(2)]
    queue = FreeBlockQueue(made)
    queue.remove(made[1])
    queue.append(made[1])
    assert_order(queue, [0, 2, 1])


def test_a_subclass_with_links_of_its_own_is_another_class() -> None:
    class Shadowing(SlotBlock):
        __slots__ = ("next_free_block", "prev_free_block")

    made = [Shadowing(i) for i in range(3)]
    assert walk(FreeBlockQueue(made)) == [0, 1, 2]


def test_blocks_of_a_class_with_a_metaclass() -> None:
    class Abstract(metaclass=ABCMeta):  # noqa: B024
        def __init__(self, block_id: int) -> None:
            self.block_id = block_id
            self.prev_free_block = self.next_free_block = None

    assert_order(FreeBlockQueue([Abstract(0), Abstract(1)]), [0, 1])


def test_a_class_that_claims_to_be_another_is_not_believed() -> None:
    """By equality and hash, or by its list of bases: offsets of slots hold for true bases only."""
    FreeBlockQueue([SlotBlock(0)])

    class Equal(type):
        def __eq__(cls, other: object) -> bool:
            return True

        def __hash__(cls) -> int:
            return hash(SlotBlock)

    class Descended(type):
        @property
        def __mro__(cls) -> Any:
            return (SlotBlock, object)

    for metaclass in (Equal, Descended):
        liar: Any = metaclass("Liar", (), {"__slots__": ("block_id",)})
        liar.prev_free_block = liar.next_free_block = None
        block = liar()
        block.block_id = 0
        with pytest.raises(TypeError, match="not a KV-cache block"):
            FreeBlockQueue([]).append(block)


def test_slots_of_another_class_are_not_read() -> None:
    class Big:
        __slots__ = tuple(f"s{i}" for i in range(400))

    class Borrower:
        __slots__ = ("block_id",)
        prev_free_block = vars(Big)["s398"]
        next_free_block = vars(Big)["s399"]

    assert not can_serve_links(Borrower)
    with pytest.raises(TypeError):
        serve_links(Borrower)


@pytest.mark.parametrize("thing", [3, "x", None])
def test_only_classes_can_have_links(thing: Any) -> None:
    assert not can_serve_links(thing)


class CodeAsKey:
    """A key of a dict that runs code when one of the names that a queue looks up meets it."""

    meetings = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        CodeAsKey.meetings += 1
        return False


@pytest.mark.parametrize("name", ["block_id", "prev_free_block", "next_free_block"])
def test_keys_of_a_dict_that_could_run_code_are_refused(name: str) -> None:
    """They could do anything in the middle of any call, such as to replace the dict itself."""
    made = [DictBlock(i) for i in range(8)]
    strange = DictBlock(8)
    queue = FreeBlockQueue(made)
    batch = queue.popleft_n(4)
    known = dict(made[3].__dict__)
    for block in (made[3], strange):
        attributes: Any = {CodeAsKey(name): 0}
        block.__dict__ = attributes | block.__dict__
    calls: dict[str, Any] = {
        "append": lambda: queue.append(made[3]),
        "append_n": lambda: queue.append_n(batch),
        "prepend_n": lambda: queue.prepend_n(batch),
        "remove": lambda: queue.remove(made[3]),
        "grow_after": lambda: queue.grow_after(made[3]),
        "a link": lambda: made[3].prev_free_block,
        "to set a link": lambda: setattr(made[3], "next_free_block", None),
        "a block never seen": lambda: queue.append(strange),
        "another queue": lambda: FreeBlockQueue([made[0], strange]),
    }
    meetings = CodeAsKey.meetings
    for call in calls.values():
        with pytest.raises(TypeError, match="a key in the __dict__ of a DictBlock is no str"):
            call()
        assert CodeAsKey.meetings == meetings
        assert_order(queue, [4, 5, 6, 7])
    made[3].__dict__ = known
    queue.append_n(batch)
    assert_order(queue, [4, 5, 6, 7, 0, 1, 2, 3])


def test_an_id_that_is_computed_is_refused() -> None:
    class Computed:
        prev_free_block = next_free_block = None
        block_id = property(lambda self: 3)

    with pytest.raises(TypeError, match="Computed is not a KV-cache block"):
        FreeBlockQueue([Computed()])
    assert vars(Computed)["next_free_block"] is None


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_code_that_runs_while_ids_are_read_may_use_the_queue(block_class: Any) -> None:
    """An attribute hook that queues the block elsewhere while append_n looks at the batch."""

    class Meddling(block_class):  # type: ignore[misc]
        meddle: Any = None

        def __getattribute__(self, name: str) -> Any:
            if name == "block_id" and (meddle := type(self).meddle):
                type(self).meddle = None
                meddle()
            return super().__getattribute__(name)

    made = [Meddling(i) for i in range(6)]
    queue, other = FreeBlockQueue(made[:4]), FreeBlockQueue([])
    queue.popleft_n(2)
    for meddle in (
        lambda: other.append(made[5]),
        lambda: queue.append(made[5]),
        lambda: queue.popleft(),
        lambda: queue.append(made[0]),
    ):
        Meddling.meddle = meddle
        with contextlib.suppress(RuntimeError, ValueError):
            queue.append_n([made[4], made[0], made[5]])
        Meddling.meddle = None
        for subject in (queue, other):
            assert subject.check() == ""
            subject.popleft_n(subject.num_free_blocks)


PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"policy": "sorted"},
    {"policy": "extent", "size": 2},
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("verb", ["append", "append_n", "prepend_n"])
@pytest.mark.parametrize("kind", ["slots", "dict", "no dict entry"])
def test_a_block_whose_links_were_overwritten_is_not_queued_twice(
    kind: str, verb: str, placement: dict[str, Any]
) -> None:
    """Behind our back: what a queue knows of its blocks counts, not what they say of themselves."""
    has_slots = kind == "slots"
    # A class of its own: nobody has served the links of its blocks yet.
    fields = [(name, Any, None) for name in ("block_id", "prev_free_block", "next_free_block")]
    fresh: Any = make_dataclass("Fresh", fields, slots=has_slots, repr=False)
    slot = vars(fresh)["prev_free_block"] if has_slots else None
    made = [fresh(i) for i in range(6)]
    queue = FreeBlockQueue(made, **placement)
    free = ids(queue.get_all_free_blocks())
    if slot is not None:
        slot.__set__(made[1], None)
    elif kind == "dict":
        vars(made[1])["prev_free_block"] = None
    else:
        del vars(made[1])["prev_free_block"]
    with pytest.raises(RuntimeError, match="block 1 is already queued"):
        getattr(queue, verb)(made[1] if verb == "append" else [made[1]])
    assert queue.num_free_blocks == 6
    assert ids(queue.popleft_n(6)) == free
    assert queue.num_free_blocks == 0


def test_one_queue_holds_one_class_of_blocks() -> None:
    queue = FreeBlockQueue([SlotBlock(0)])
    with pytest.raises(TypeError, match="holds blocks of the class SlotBlock, not DictBlock"):
        queue.append(DictBlock(1))
    assert_order(queue, [0])


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_a_copied_block_is_another_block(block_class: Any) -> None:
    made = [block_class(i) for i in range(3)]
    queue = FreeBlockQueue(made)
    queue.popleft()
    twins = [copy.copy(made[0])]
    if block_class is SlotBlock:
        twins.append(pickle.loads(pickle.dumps(made[0])))
    for twin in twins:
        assert twin.prev_free_block is None
        with pytest.raises(RuntimeError, match="block 0 is foreign"):
            queue.append(twin)


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_a_queued_block_is_not_queued_again_under_another_id(block_class: Any) -> None:
    made = [block_class(i) for i in range(3)]
    queue = FreeBlockQueue(made)
    made[0].block_id = 100
    for attempt in (
        lambda: queue.append(made[0]),
        lambda: FreeBlockQueue([]).append(made[0]),
        lambda: FreeBlockQueue([made[0]]),
    ):
        with pytest.raises(RuntimeError, match="block 100 had another id"):
            attempt()
    made[0].block_id = 0
    assert_order(queue, [0, 1, 2])


def test_a_copy_of_a_block_can_be_made_a_block_of_its_own() -> None:
    made = [DictBlock(i) for i in range(2)]
    queue = FreeBlockQueue(made)
    twin = copy.copy(made[0])
    twin.block_id = 7
    with pytest.raises(RuntimeError, match="or is a copy of a block"):
        queue.append(twin)
    twin.prev_free_block = twin.next_free_block = None
    queue.append(twin)
    assert_order(queue, [0, 1, 7])


def test_an_id_that_was_changed_is_noticed() -> None:
    made = [SlotBlock(i) for i in range(3)]
    queue = FreeBlockQueue(made)
    block = queue.popleft()
    for wrong in (2, 10**30, "0"):
        block.block_id = wrong
        with pytest.raises((RuntimeError, TypeError)):
            queue.append(block)
    block.block_id = 0
    made[1].block_id = 7
    assert queue.check() == "the block at id 1 says that its id is 7"


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_an_id_that_was_deleted_is_noticed(block_class: Any) -> None:
    made = [block_class(i) for i in range(3)]
    queue = FreeBlockQueue(made)
    block = queue.popleft()
    for each in (block, made[1]):
        del each.block_id
    with pytest.raises(TypeError, match="block id None is not an int"):
        queue.append(block)
    assert queue.check() == "the block at id 1 says that its id is None"
    made[1].block_id = 1
    assert_order(queue, [1, 2])
