"""What only the native class has to answer for: memory, references, the garbage collector."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
from implementations import DictBlock, SlotBlock, ids, walk

import pyblockpool
from pyblockpool import FreeBlockQueue, _queue, reference
from pyblockpool._queue import (
    MAX_BLOCK_ID,
    FreeListEnd,
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
        # The least of several attempts: other threads of the test runner allocate too.
        left = []
        for _ in range(3):
            before = gc.get_count()[0]
            for _ in range(70_000):
                queue.append(queue.popleft())
                queue.remove(made[40])
                queue.append(made[40])
                queue.append_n(batch)
                batch = queue.popleft_n(16)
            left.append(gc.get_count()[0] - before)
        assert min(left) < 10
        # Objects that come and go within one operation, the list of blocks that is returned apart.
        tracemalloc.start()
        peaks = []
        for _ in range(1_000):
            tracemalloc.reset_peak()
            start = tracemalloc.get_traced_memory()[0]
            queue.append(queue.popleft())
            queue.remove(made[40])
            queue.append(made[40])
            queue.append_n(batch)
            peaks.append(tracemalloc.get_traced_memory()[1] - start)
            batch = queue.popleft_n(16)
        assert min(peaks) < 64
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


def test_the_package_holds_what_it_should() -> None:
    """Types and the compiled module; nothing of the tests and no sources of C++."""
    folder = Path(_queue.__file__).parent
    names = {path.name for path in folder.iterdir()}
    assert {"py.typed", "_queue.pyi", "reference.py", "plugin"} <= names
    assert not names & {"tests", "bench", "csrc", "queue.cpp"}


def test_version() -> None:
    assert pyblockpool.__version__.count(".") == 2
