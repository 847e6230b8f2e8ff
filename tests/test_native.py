"""What only the native class has to answer for: memory, references, and the links of a class."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import tracemalloc
import weakref
from abc import ABCMeta
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from implementations import QUEUES, DictBlock, SlotBlock, assert_order, ids, walk

import pyblockpool
from pyblockpool import FreeBlockQueue, _queue, reference
from pyblockpool._queue import (
    MAX_BLOCK_ID,
    FreeListEnd,
    can_serve_links,
    serve_links,
    withdraw_links,
)


class Pool:
    """Stands for vLLM's pool: blocks know it, it knows the queue, the queue knows the blocks."""

    def __init__(self, block_class: Any, n: int) -> None:
        self.blocks = [block_class(i) for i in range(n)]
        for block in self.blocks:
            block.pool = self
        self.queue = FreeBlockQueue(self.blocks)


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
@pytest.mark.parametrize("in_use", [0, 3, 8])
def test_a_dropped_pool_is_collected(block_class: Any, in_use: int) -> None:
    pool = Pool(block_class, 8)
    pool.queue.popleft_n(in_use)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_an_empty_queue_is_collected() -> None:
    class Watched(FreeBlockQueue):
        pass

    queue = Watched([])
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None


def test_looking_at_links_while_the_collector_runs_does_not_crash() -> None:
    """A finalizer sees a block whose queue the collector has begun to take apart."""
    seen = []

    class Nosy:
        def __init__(self, pool: Pool) -> None:
            self.pool = pool

        def __del__(self) -> None:
            block = self.pool.blocks[3]
            seen.append((block.next_free_block.block_id, self.pool.queue.popleft().block_id))

    pool = Pool(SlotBlock, 6)
    pool.nosy = Nosy(pool)  # type: ignore[attr-defined]
    del pool
    gc.collect()
    assert seen == [(4, 0)]


def test_a_queue_whose_list_of_blocks_was_emptied_refuses() -> None:
    """What the collector does to the queue, done by hand."""
    queue = FreeBlockQueue([SlotBlock(i) for i in range(4)])
    held = queue.get_all_free_blocks()
    inside = next(x for x in gc.get_referents(queue) if isinstance(x, list))
    inside.clear()
    for call in (queue.popleft, lambda: queue.popleft_n(2), lambda: queue.remove(held[0])):
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises((RuntimeError, IndexError)):
        queue.get_all_free_blocks()
    assert held[1].next_free_block is None
    assert queue.check() != ""


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_reference_counts_stay_flat(block_class: Any) -> None:
    made = [block_class(i) for i in range(8)]
    queue = FreeBlockQueue(made)

    def program() -> None:
        queue.append_n(queue.popleft_n(5))
        queue.append(queue.popleft())
        queue.remove(made[3])
        queue.prepend_n([made[3]])
        list(queue.iter_blocks_after(made[2]))
        walk(queue)
        queue.get_all_free_blocks()
        queue.reorder()
        queue.check()
        queue.stats()
        for mistake in (
            lambda: queue.append(made[1]),
            lambda: queue.append_n([block_class(20), made[1]]),
            lambda: queue.prepend_n([block_class(1)]),
            lambda: queue.popleft_n(100),
            lambda: queue.popleft_n(-1),
            lambda: queue.remove(block_class(2)),
            lambda: setattr(made[1], "next_free_block", None),
        ):
            with pytest.raises((RuntimeError, AssertionError, ValueError)):
                mistake()

    program()
    gc.collect()
    before = [sys.getrefcount(x) for x in (*made, queue, None, queue.fake_free_list_head)]
    for _ in range(50):
        program()
    gc.collect()
    after = [sys.getrefcount(x) for x in (*made, queue, None, queue.fake_free_list_head)]
    none = len(made) + 1
    assert abs(after.pop(none) - before.pop(none)) < 25  # None is shared with everybody
    assert after == before


def test_no_object_is_made_per_operation() -> None:
    """Over 1e6 operations no object that the collector tracks is left, and memory does not peak."""
    made = [SlotBlock(i) for i in range(64)]
    queue = FreeBlockQueue(made)
    batch = queue.popleft_n(16)
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        for _ in range(200_000):
            queue.append(queue.popleft())
            queue.remove(made[40])
            queue.append(made[40])
            queue.append_n(batch)
            batch = queue.popleft_n(16)
        assert gc.get_count()[0] - before < 10
        # Objects that come and go within one operation, the list of blocks that is returned apart.
        tracemalloc.start()
        for _ in range(1_000):
            queue.append(queue.popleft())
            queue.remove(made[40])
            queue.append(made[40])
            queue.append_n(batch)
            queue.prepend_n([])
            batch = queue.popleft_n(16)
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        queue.append(queue.popleft())
        queue.remove(made[40])
        queue.append(made[40])
        queue.append_n(batch)
        assert tracemalloc.get_traced_memory()[1] - start < 64
    finally:
        tracemalloc.stop()
        gc.enable()


def test_memory_beside_the_list_of_blocks() -> None:
    """At most 16 bytes a block, measured by the kernel in a process of its own.

    For blocks with slots. Reading those of vLLM before 0.18 makes a dict of each.
    """
    code = """
import ctypes, gc, os, sys
from implementations import SlotBlock
from pyblockpool import FreeBlockQueue

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

FreeBlockQueue([SlotBlock(0)])
made = [SlotBlock(i) for i in range(1_000_000)]
before = resident()
queue = FreeBlockQueue(made)
print((resident() - before) / len(made))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    beside = float(ran.stdout) - 8
    assert beside <= 16 + 2, f"{beside:.1f} bytes a block beside the list of blocks"


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


CALLS: dict[str, Any] = {
    "remove": lambda queue, made: queue.remove(made[2]),
    "remove what is in use": lambda queue, made: queue.remove(made[6]),
    "append": lambda queue, made: queue.append(made[6]),
    "append_n": lambda queue, made: queue.append_n([made[6], made[7]]),
    "prepend_n": lambda queue, made: queue.prepend_n([made[7], made[6]]),
    "popleft_n": lambda queue, made: queue.popleft_n(3),
    "take over": lambda queue, made: FreeBlockQueue(made[:6]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_a_failing_allocation_changes_nothing(block_class: Any, call: str) -> None:
    """Each allocation of each call fails once; what was queued stays queued, in its order."""
    testcapi: Any = pytest.importorskip("_testcapi")
    for start in range(60):
        made = [block_class(i) for i in range(8)]
        queue = FreeBlockQueue(made[:6])
        testcapi.set_nomemory(start, start + 1)
        failed = False
        try:
            CALLS[call](queue, made)
        except MemoryError:
            failed = True
        except RuntimeError:
            assert call == "remove what is in use"
        finally:
            testcapi.remove_mem_hooks()
        assert queue.check() == ""
        if failed:
            assert ids(queue.get_all_free_blocks()) == [0, 1, 2, 3, 4, 5]
            queue.append_n(made[6:])
            assert ids(queue.popleft_n(8)) == list(range(8))


@pytest.mark.parametrize("what", ["clear the batch", "reorder", "remove"])
def test_keys_of_a_dict_that_run_code_do_not_break_the_list(what: str) -> None:
    made = [DictBlock(i) for i in range(8)]
    queue = FreeBlockQueue(made)
    batch = queue.popleft_n(6)
    actions = {
        "clear the batch": batch.clear,
        "reorder": queue.reorder,
        "remove": lambda: queue.remove(made[7]),
    }
    pending: list[Any] = []

    class Key:
        def __hash__(self) -> int:
            return hash("block_id")

        def __eq__(self, other: object) -> bool:
            while pending:
                pending.pop()()
            return False

    attributes: Any = {Key(): 0}
    made[5].__dict__ = attributes | made[5].__dict__
    pending.append(actions[what])
    queue.append_n(batch)
    assert queue.check() == ""


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


def test_ids_may_be_far_apart() -> None:
    queue = FreeBlockQueue([SlotBlock(3_000_000)])
    queue.append(SlotBlock(5))
    queue.reorder()
    assert ids(queue.get_all_free_blocks()) == [5, 3_000_000]
    assert MAX_BLOCK_ID == reference.MAX_BLOCK_ID


def test_queues_can_be_subclassed() -> None:
    class Counting(FreeBlockQueue):
        def __init__(self, blocks: Any, name: str) -> None:
            super().__init__(blocks)
            self.name = name

    queue = Counting([SlotBlock(0)], "mine")
    assert (queue.name, queue.popleft().block_id) == ("mine", 0)
    with pytest.raises(RuntimeError, match="called twice"):
        queue.__init__([SlotBlock(1)], "again")  # type: ignore[misc]


def test_a_queue_is_not_copied() -> None:
    queue = FreeBlockQueue([SlotBlock(0)])
    with pytest.raises(TypeError):
        copy.copy(queue)
    with pytest.raises(TypeError):
        pickle.dumps(queue)


def test_objects_made_by_hand_do_not_crash() -> None:
    end = FreeListEnd()
    assert end.next_free_block is None
    with pytest.raises(RuntimeError):
        end.next_free_block = None
    link = type(vars(SlotBlock)["prev_free_block"])()
    with pytest.raises(TypeError):
        link.__get__(SlotBlock(0), SlotBlock)
    iterator = type(FreeBlockQueue([]).iter_blocks_after(None))()
    assert list(iterator) == []
    assert repr(FreeBlockQueue.__new__(FreeBlockQueue)).endswith("free=0>")


def test_native_and_reference_have_the_same_members_and_signatures() -> None:
    def public(cls: Any) -> set[str]:
        return {name for name in dir(cls([])) if not name.startswith("_")}

    assert public(FreeBlockQueue) == public(reference.FreeBlockQueue)
    for name in public(FreeBlockQueue):
        ours = getattr(FreeBlockQueue, name)
        if callable(ours):
            spec = inspect.signature(getattr(reference.FreeBlockQueue, name))
            assert list(inspect.signature(ours).parameters) == list(spec.parameters), name
            assert ours.__doc__, name


@pytest.mark.skipif("PYBLOCKPOOL_SANITIZED" not in os.environ, reason="not a sanitizer run")
def test_the_sanitized_module_is_the_one_under_test() -> None:
    expected = Path(os.environ["PYBLOCKPOOL_SANITIZED"]).resolve()
    assert Path(_queue.__file__).is_relative_to(expected)
    assert "libasan" in Path("/proc/self/maps").read_text()


def test_version() -> None:
    assert pyblockpool.__version__.count(".") == 2
