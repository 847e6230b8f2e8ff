"""Code of others in the middle of a call: other threads, finalizers, destructors, metaclasses.

The queue is for one thread at a time, and takes no lock. The interpreter's lock is given up only
where Python code runs, so whatever happens in between, the lists stay whole: what is no longer true
is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, ClassVar

import pytest
from implementations import DictBlock, SlotBlock, assert_order, ids, walk

from pyblockpool import FreeBlockQueue, _contiguity, _queue

REFUSALS = (RuntimeError, ValueError, AssertionError)
N = 48
LINKS = ("prev_free_block", "next_free_block")


class Yielding(list[Any]):
    """A batch that lets others run while it is read."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
@pytest.mark.parametrize(
    "placement", [{}, {"policy": "sorted"}, {"policy": "extent", "size": 4, "pack_tails": True}]
)
def test_threads_do_not_break_a_queue(block_class: Any, placement: dict[str, Any]) -> None:
    class Brief(block_class):  # type: ignore[misc]
        __slots__ = ()

        def __repr__(self) -> str:
            return f"<block {self.block_id}>"

    made = [Brief(i) for i in range(N)]
    queues = [FreeBlockQueue(made[: N // 2], **placement), FreeBlockQueue(made[N // 2 :])]
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def play(seed: int) -> None:
        chance = Random(seed)
        try:
            start.wait(timeout=60)
            for _ in range(1500):
                queue = chance.choice(queues)
                some = Yielding(chance.sample(made, chance.randint(0, 4)))
                calls: list[Callable[[], Any]] = [
                    queue.popleft,
                    lambda: queue.popleft_n(chance.randint(0, 6)),  # noqa: B023
                    lambda: queue.remove(chance.choice(made)),  # noqa: B023
                    lambda: queue.append(chance.choice(made)),  # noqa: B023
                    lambda: queue.append_n(some),  # noqa: B023
                    lambda: queue.prepend_n(some),  # noqa: B023
                    lambda: queue.append_n(queue.popleft_n(3)),  # noqa: B023
                    lambda: queue.grow_after(chance.choice([None, *some])),  # noqa: B023
                    lambda: FreeBlockQueue(some, **placement),  # noqa: B023
                    queue.get_all_free_blocks,
                    lambda: list(queue.iter_blocks_after(None)),  # noqa: B023
                    queue.forget_hashes,
                    queue.reorder,
                    queue.stats,
                    queue.check,
                    lambda: made[0].next_free_block,
                ]
                with contextlib.suppress(*REFUSALS):
                    chance.choice(calls)()
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=play, args=[seed]) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    for queue in queues:
        assert queue.check() == ""
        assert walk(queue) == ids(queue.get_all_free_blocks())


class Meddler:
    """Runs `meddle` once, when it goes, be it by its last reference or by the garbage collector."""

    def __init__(self, meddle: Callable[[], Any], done: list[bool]) -> None:
        self._meddle = meddle
        self._done = done
        self.itself = self

    def __del__(self) -> None:
        self._done.append(True)
        with contextlib.suppress(*REFUSALS):
            self._meddle()


def meddlings(queue: Any, other: Any, made: list[Any]) -> dict[str, Callable[[], Any]]:
    """What somebody else may do with a queue, and with blocks that are on their way into it."""
    return {
        "append one of them": lambda: queue.append(made[9]),
        "append it elsewhere": lambda: other.append(made[9]),
        "take what is free": lambda: queue.popleft_n(3),
        "take one": lambda: queue.remove(made[1]),
        "make room": lambda: queue.append(type(made[0])(200)),
        "another block with its id": lambda: queue.append(type(made[0])(9)),
        "another id": lambda: setattr(made[9], "block_id", 77),
        "another queue": lambda: FreeBlockQueue(made[7:10]),
        "reorder": queue.reorder,
    }


MEDDLINGS = list(meddlings(FreeBlockQueue([]), FreeBlockQueue([]), [SlotBlock(0)]))


@contextlib.contextmanager
def collecting_after(countdown: int) -> Iterator[None]:
    """The garbage collector runs once so many objects more have been made."""
    before = gc.get_threshold()
    gc.set_threshold(gc.get_count()[0] + countdown)
    try:
        yield
    finally:
        gc.set_threshold(*before)


collects_in_calls = pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="this Python collects between instructions, and so in none of these calls",
)


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """To the garbage collector: there are millions where vLLM is imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Only who takes blocks over overwrites an old link: the others refuse the block.
TRIGGERS = [
    *(("collector", verb) for verb in ("append_n", "prepend_n", "popleft_n", "FreeBlockQueue")),
    ("link", "FreeBlockQueue"),
]


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(("trigger", "verb"), TRIGGERS)
@pytest.mark.parametrize("meddling", MEDDLINGS)
@pytest.mark.parametrize("block_class", [SlotBlock, DictBlock])
def test_destructors_in_the_middle_of_a_call(
    block_class: Any, meddling: str, verb: str, trigger: str
) -> None:
    """Of garbage, which Python before 3.12 collects wherever something is allocated, and of the
    link that a block had before it came to the queue."""
    if trigger == "collector" and sys.version_info >= (3, 12):
        pytest.skip("this Python collects between instructions, and so in none of these calls")
    in_a_call: list[bool] = []
    for countdown in range(1, 12 if trigger == "collector" else 2):
        made = [block_class(i) for i in range(12)]
        queue, other = FreeBlockQueue(made[:6]), FreeBlockQueue([])
        queue.popleft()
        batch = [made[0], *made[8:12]]
        gc.collect()
        done: list[bool] = []
        meddler = Meddler(meddlings(queue, other, made)[meddling], done)
        call: dict[str, Callable[[], Any]] = {
            "append_n": lambda: queue.append_n(batch),  # noqa: B023
            "prepend_n": lambda: queue.prepend_n(batch),  # noqa: B023
            "popleft_n": lambda: queue.popleft_n(4),  # noqa: B023
            "FreeBlockQueue": lambda: FreeBlockQueue(made[4:12]),  # noqa: B023
        }
        if trigger == "link":
            meddler.itself = None  # type: ignore[assignment]
            made[10].prev_free_block = meddler
        before = gc.get_threshold()
        del meddler
        gc.set_threshold(gc.get_count()[0] + countdown if trigger == "collector" else 0)
        built: Any = None
        try:
            built = call[verb]()
        except REFUSALS:
            pass
        finally:
            in_a_call += done
            gc.set_threshold(*before)
        gc.collect()
        queues = [queue, other] + ([built] if isinstance(built, FreeBlockQueue) else [])
        for each in queues:
            if each.check() == "the block at id 9 says that its id is 77":
                made[9].block_id = 9  # changed when the call was done
            assert each.check() == ""
            assert walk(each) == ids(each.get_all_free_blocks())
        queued = [block for each in queues for block in each.get_all_free_blocks()]
        assert len({id(block) for block in queued}) == len(queued), "a block is in two queues"
    assert in_a_call


@collects_in_calls
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("base", [SlotBlock, DictBlock])
def test_a_class_is_served_once_whoever_serves_it_in_the_middle(base: Any) -> None:
    """The first queue of a class serves its links, and a destructor makes another first queue."""
    built: list[Any] = []
    done: list[bool] = []
    for countdown in range(1, 25):
        members: dict[str, Any] = (
            {"__slots__": LINKS} if base is SlotBlock else dict.fromkeys(LINKS)
        )
        fresh: Any = type("Fresh", (base,), members)
        made, others = ([fresh(i) for i in range(4)] for _ in range(2))
        built.clear()
        gc.collect()
        Meddler(lambda: built.append(FreeBlockQueue(others)), done)  # noqa: B023
        with collecting_after(countdown):
            queue = FreeBlockQueue(made)
        gc.collect()
        assert _queue.queues_of(fresh) == 2
        for each in (queue, *built):
            each.append(fresh(7))
            assert_order(each, [0, 1, 2, 3, 7])
    assert done


def test_a_class_is_served_once_by_a_metaclass_too() -> None:
    class Eager(type):
        built: ClassVar[list[Any]] = []

        def __setattr__(cls, name: str, value: Any) -> None:
            if not Eager.built:
                Eager.built.append(None)
                with contextlib.suppress(RuntimeError):
                    Eager.built.append(FreeBlockQueue([cls(9)]))
            super().__setattr__(name, value)

    fresh: Any = Eager("Fresh", (DictBlock,), dict.fromkeys(LINKS))
    queue = FreeBlockQueue([fresh(0)])
    assert _queue.queues_of(fresh) == len(Eager.built)
    queue.append(fresh(1))
    assert_order(queue, [0, 1])


@collects_in_calls
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("verb", ["append_n", "a walk", "a link"])
def test_no_attributes_of_a_block_are_made_twice(verb: str) -> None:
    """Python 3.11 makes two dicts of one block, and then frees what they share twice, where the
    garbage collector runs in the middle and what it calls looks at the same block."""
    done: list[bool] = []
    _queue.serve_links(DictBlock)
    for countdown in range(1, 30):
        made = [DictBlock.__new__(DictBlock) for _ in range(24)]  # their links were never set
        for i, block in enumerate(made):
            block.block_id = i
        queue = FreeBlockQueue([DictBlock(24)])
        calls: dict[str, Callable[[], Any]] = {
            "append_n": lambda: queue.append_n(made),  # noqa: B023
            "a walk": lambda: [list(queue.iter_blocks_after(block)) for block in made],  # noqa: B023
            "a link": lambda: [block.next_free_block for block in made],  # noqa: B023
        }
        seen: list[dict[str, Any]] = []
        gc.collect()
        Meddler(lambda: seen.extend(map(vars, made)), done)  # noqa: B023
        spare: list[Any] = [{} for _ in range(100)]  # Python keeps no more for reuse
        with contextlib.suppress(*REFUSALS), collecting_after(countdown):
            calls[verb]()
        del spare
        gc.collect()
        assert [id(each) for each in seen] == [id(vars(block)) for block in made]
    assert done


def test_a_class_that_is_withdrawn_while_its_blocks_are_admitted() -> None:
    """By a hook of the block, before the queue counts as one that has such blocks."""

    class Fickle(DictBlock):
        prev_free_block = next_free_block = None  # links of its own
        armed = False

        def __getattribute__(self, name: str) -> Any:
            if name == "block_id" and Fickle.armed:
                Fickle.armed = False
                _queue.withdraw_links(Fickle)
            return super().__getattribute__(name)

    made = [Fickle(i) for i in range(3)]
    _queue.serve_links(Fickle)
    queue = FreeBlockQueue([])
    Fickle.armed = True
    with contextlib.suppress(RuntimeError):
        queue.append_n([*made, made[0]])
    Fickle.armed = False
    assert_order(queue, [])
    queue.append_n(made)
    assert_order(queue, [0, 1, 2])


def declared_slots(module: ModuleType) -> dict[int, int | None]:
    """The slots of the definition of a compiled module, by their number."""
    definition_of = ctypes.pythonapi.PyModule_GetDef
    definition_of.restype = ctypes.c_void_p
    definition_of.argtypes = [ctypes.py_object]
    # PyModuleDef_Base (refcount, type, init, index, copy), then name, doc, size, methods, slots.
    pointer = ctypes.sizeof(ctypes.c_void_p)
    base = object.__basicsize__ + 3 * pointer
    found: dict[int, int | None] = {}
    definition = definition_of(module)
    at = ctypes.c_void_p.from_address(definition + base + 4 * pointer).value
    while at is not None:
        number = ctypes.c_int.from_address(at).value
        if number == 0:
            return found
        found[number] = ctypes.c_void_p.from_address(at + pointer).value
        at += 2 * pointer
    return found


PY_MOD_EXEC, PY_MOD_GIL, GIL_NOT_USED = 2, 4, 1


@pytest.mark.parametrize("module", [_queue, _contiguity])
def test_no_module_says_that_it_needs_no_lock(module: ModuleType) -> None:
    """An interpreter without the global lock turns it on again for modules that do not say so."""
    slots = declared_slots(module)
    assert PY_MOD_EXEC in slots
    assert slots.get(PY_MOD_GIL) != GIL_NOT_USED


def test_no_source_says_so_either() -> None:
    """Before Python 3.13 the compiled modules could not."""
    sources = Path(__file__).parent.parent / "csrc"
    texts = [path.read_text() for path in sources.glob("*.[chp]*")]
    assert len(texts) > 4
    for text in texts:
        assert "freethreading_compatible" not in text
        assert "mod_gil_not_used" not in text
        assert "Py_MOD_GIL_NOT_USED" not in text
