"""No memory for one allocation or for all from one on: MemoryError, and nothing has changed.

Those of Python fail through `_testcapi`, which not every Python has. `new` in C++ fails in modules
that were built with PYBLOCKPOOL_FAILING_NEW, as `make sanitize` does.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from implementations import DictBlock, SlotBlock, ids, walk

from pyblockpool import FreeBlockQueue, _contiguity, _queue
from pyblockpool.contiguity import Contiguity, Copies


@dataclass
class Allocator:
    """Fails what `fail(first, end)` says: allocations number `first` (1 is the next) to `end - 1`,
    without an end if that is 0."""

    fail: Callable[[int, int], None]
    stop: Callable[[], None]
    # How many there were since `fail()`, where that is known.
    made: Callable[[], int] = lambda: 0


def of_python(_module: ModuleType) -> Allocator:
    testcapi = pytest.importorskip("_testcapi", reason="this Python has no _testcapi")
    return Allocator(testcapi.set_nomemory, testcapi.remove_mem_hooks)


def of_cxx(module: ModuleType) -> Allocator:
    library = ctypes.CDLL(str(module.__file__))
    if not hasattr(library, "pyblockpool_fail_new"):
        pytest.skip("not built with PYBLOCKPOOL_FAILING_NEW")
    fail = library.pyblockpool_fail_new
    fail.argtypes = [ctypes.c_longlong, ctypes.c_longlong]
    made = library.pyblockpool_news
    made.restype = ctypes.c_longlong
    return Allocator(fail, lambda: fail(0, 0), made)


ALLOCATORS = {"python": of_python, "c++": of_cxx}


class NoMemory:
    """Stands for the MemoryError, whose traceback would hold on to what the call had in hand."""


def outcomes(
    allocator: Allocator, once: bool, prepare: Callable[[], partial[Any]]
) -> Iterator[Any]:
    """The call that `prepare` makes, anew for each allocation that fails in it: NoMemory again and
    again, and at last what the call returns, or the class of what it raises, when none of its
    allocations has failed. Not a function in Python: that allocates, and leaks where it cannot."""
    for first in count(1):
        call = prepare()
        answer: Any = NoMemory
        made = 0
        gc.disable()  # it would call what others have registered, and fail there
        stop = allocator.stop
        try:
            allocator.fail(first, first + 1 if once else 0)
            try:
                answer = call()
                made = allocator.made()
            finally:
                stop()
        except MemoryError:
            pass
        except Exception as error:
            answer = type(error)
        finally:
            gc.enable()
        del call
        yield answer
        if answer is not NoMemory:
            assert made < first, "it goes on although an allocation has failed"
            return
        assert first < 500, "it fails for another reason"


def brief(block_class: Any) -> Any:
    """The links of a block lead to all others, and with the `repr` of a dataclass so does that."""
    members = {"__slots__": (), "__repr__": lambda block: f"<block {block.block_id}>"}
    return type(block_class.__name__, (block_class,), members)


BLOCKS = {"slots": brief(SlotBlock), "dict": brief(DictBlock)}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "lru": {},
    "sorted": {"policy": "sorted"},
    "extent": {"policy": "extent", "size": 4},
    "packed": {"policy": "extent", "size": 4, "pack_tails": True},
}


class Scene:
    """A queue, and another one beside it.

    Blocks 0 to 5 and 16 to 19 are in use, 6 and 7 were freed with a hash, 30 to 39 never seen.
    """

    def __init__(self, block_class: Any, placement: dict[str, Any]) -> None:
        self.block_class = block_class
        self.placement = placement
        self.blocks = [block_class(i) for i in range(40)]
        self.queue = FreeBlockQueue(self.blocks[:30], **placement)
        for block in self.blocks[:8] + self.blocks[16:20]:
            self.queue.remove(block)
        self.queue.append_n([self.blocks[7], self.blocks[6]])
        self.other = FreeBlockQueue([block_class(i) for i in range(40, 44)], **placement)

    def build(self) -> partial[Any]:
        """Another queue, of blocks that are queued, in use, and in no queue yet."""
        return partial(FreeBlockQueue, self.blocks[4:12] + self.blocks[30:], **self.placement)

    def grow(self) -> partial[Any]:
        self.queue.grow_after(self.blocks[5])
        return partial(self.queue.popleft_n, 5)

    def state(self) -> Any:
        """All that can be seen; references to the blocks are counted by `references`."""
        return [
            [ids(q.get_all_free_blocks()), walk(q), q.num_free_blocks, q.stats(), q.check()]
            for q in (self.queue, self.other)
        ] + [
            [block.prev_free_block is None, block.next_free_block is None] for block in self.blocks
        ]

    def references(self) -> list[int]:
        return [sys.getrefcount(block) for block in self.blocks]

    def rest(self) -> list[int]:
        """What it hands out from here on."""
        rest = [ids(self.queue.popleft_n(min(3, self.queue.num_free_blocks)))]
        self.queue.grow_after(None)
        while self.queue.num_free_blocks:
            rest.append([self.queue.popleft().block_id])
        return [block_id for some in rest for block_id in some]


CALLS: dict[str, Callable[[Scene], partial[Any]]] = {
    "popleft": lambda s: partial(s.queue.popleft),
    "popleft_n": lambda s: partial(s.queue.popleft_n, 15),
    "popleft_n beside": Scene.grow,
    "remove": lambda s: partial(s.queue.remove, s.blocks[10]),
    "append": lambda s: partial(s.queue.append, s.blocks[2]),
    "append a new one": lambda s: partial(s.queue.append, s.blocks[35]),
    "append_n": lambda s: partial(s.queue.append_n, s.blocks[:6]),
    "append_n a tuple": lambda s: partial(s.queue.append_n, tuple(s.blocks[:6])),
    "append_n new ones": lambda s: partial(s.queue.append_n, s.blocks[16:20] + s.blocks[30:]),
    "prepend_n": lambda s: partial(s.queue.prepend_n, s.blocks[:6]),
    "prepend_n new ones": lambda s: partial(s.queue.prepend_n, s.blocks[30:] + s.blocks[:2]),
    "reorder": lambda s: partial(s.queue.reorder),
    "forget_hashes": lambda s: partial(s.queue.forget_hashes),
    "grow_after": lambda s: partial(s.queue.grow_after, s.blocks[1]),
    "get_all_free_blocks": lambda s: partial(s.queue.get_all_free_blocks),
    "a walk": lambda s: partial(list, s.queue.iter_blocks_after(s.blocks[12])),
    "begin a walk": lambda s: partial(bool, s.queue.iter_blocks_after(None)),
    "the head": lambda s: partial(getattr, s.queue.fake_free_list_head, "next_free_block"),
    "a link": lambda s: partial(getattr, s.blocks[9], "prev_free_block"),
    "a link of one in use": lambda s: partial(getattr, s.blocks[1], "next_free_block"),
    "check": lambda s: partial(s.queue.check),
    "stats": lambda s: partial(s.queue.stats),
    "repr": lambda s: partial(repr, s.queue),
    "a queue": Scene.build,
}
MISTAKES: dict[str, tuple[Callable[[Scene], partial[Any]], type[Exception]]] = {
    "remove one in use": (lambda s: partial(s.queue.remove, s.blocks[1]), RuntimeError),
    "append a queued one": (lambda s: partial(s.queue.append, s.blocks[9]), RuntimeError),
    "append one of another queue": (
        lambda s: partial(s.queue.append, s.other.get_all_free_blocks()[0]),
        RuntimeError,
    ),
    "append_n one twice": (
        lambda s: partial(s.queue.append_n, [s.blocks[1], s.blocks[1]]),
        RuntimeError,
    ),
    "prepend_n a queued one": (
        lambda s: partial(s.queue.prepend_n, [*s.blocks[30:], s.blocks[9]]),
        RuntimeError,
    ),
    "append_n no block": (lambda s: partial(s.queue.append_n, [s.blocks[1], None]), TypeError),
    "popleft_n too many": (lambda s: partial(s.queue.popleft_n, 1000), AssertionError),
    "popleft_n less than none": (lambda s: partial(s.queue.popleft_n, -1), ValueError),
    "grow_after a queued one": (lambda s: partial(s.queue.grow_after, s.blocks[9]), RuntimeError),
    "no policy": (lambda s: partial(FreeBlockQueue, s.blocks, policy="fifo"), ValueError),
    "an id twice": (
        lambda s: partial(FreeBlockQueue, [s.blocks[1], s.block_class(1)]),
        RuntimeError,
    ),
}


def plain(answer: Any) -> Any:
    """Blocks as their ids."""
    if isinstance(answer, FreeBlockQueue):
        return [plain(answer.get_all_free_blocks()), answer.stats(), answer.check()]
    if isinstance(answer, list):
        return [plain(each) for each in answer]
    return getattr(answer, "block_id", answer)


once_or_on = pytest.mark.parametrize("once", [True, False], ids=["one fails", "all from one on"])
each_source = pytest.mark.parametrize("source", ALLOCATORS)
each_class = pytest.mark.parametrize("kind", BLOCKS)


@once_or_on
@each_source
@pytest.mark.parametrize("placement", PLACEMENTS)
@each_class
def test_a_call_without_memory_changes_nothing(
    kind: str, placement: str, source: str, once: bool
) -> None:
    allocator = ALLOCATORS[source](_queue)
    failed = set()
    for name, call in CALLS.items():
        twin = Scene(BLOCKS[kind], PLACEMENTS[placement])
        before = twin.state()
        answer = call(twin)()
        expected, after = plain(answer), twin.state()
        scene = Scene(BLOCKS[kind], PLACEMENTS[placement])
        references = scene.references()
        for answer in outcomes(allocator, once, partial(call, scene)):
            if answer is NoMemory:
                failed.add(name)
                assert scene.state() == before, name
                # list() of Python 3.11 leaks what it copies when it finds no memory.
                assert source == "python" or scene.references() == references, name
        assert plain(answer) == expected, name
        assert scene.state() == after, name
        assert scene.rest() == twin.rest(), name
    assert failed >= {"append a new one", "prepend_n new ones", "a queue"}


@once_or_on
@each_source
@pytest.mark.parametrize("placement", ["lru", "extent"])
@each_class
def test_a_refusal_without_memory_changes_nothing(
    kind: str, placement: str, source: str, once: bool
) -> None:
    """It may find no memory for its sentence."""
    allocator = ALLOCATORS[source](_queue)
    for name, (call, error) in MISTAKES.items():
        scene = Scene(BLOCKS[kind], PLACEMENTS[placement])
        before = scene.state()
        for answer in outcomes(allocator, once, partial(call, scene)):
            assert answer in (error, NoMemory), name
            assert scene.state() == before, name
        assert answer is error, name


@once_or_on
@each_source
@each_class
def test_a_class_without_memory_is_not_served(kind: str, source: str, once: bool) -> None:
    """The first queue of a class changes that class; without memory it can still be put back."""
    allocator = ALLOCATORS[source](_queue)
    blocks: list[Any] = []
    original: dict[str, Any] = {}

    def prepare() -> partial[Any]:
        cls: Any = type("Fresh", (), members | {"__slots__": slots} if slots else members)
        blocks[:] = [cls() for _ in range(6)]
        for i, block in enumerate(blocks):
            block.block_id = i
            if slots:
                block.prev_free_block = block.next_free_block = None
        original.clear()
        original.update(vars(cls))
        return partial(FreeBlockQueue, blocks)

    slots = ["block_id", *LINKS] if kind == "slots" else []
    members: dict[str, Any] = {} if slots else dict.fromkeys(LINKS)
    for answer in outcomes(allocator, once, prepare):
        cls = type(blocks[0])
        assert (_queue.queues_of(cls) == 0) == (answer is NoMemory)
        if answer is NoMemory:
            _queue.withdraw_links(cls)
            assert dict(vars(cls)) == original
            answer = FreeBlockQueue(blocks)
        assert ids(answer.popleft_n(6)) == [0, 1, 2, 3, 4, 5]


LINKS = ("prev_free_block", "next_free_block")
TABLE = np.arange(1, 5001, dtype=np.int32)[::-1].copy()
FIGURES: dict[str, Callable[[], partial[Any]]] = {
    "table": lambda: partial(_contiguity.table_figures, TABLE, 8),
    "short table": lambda: partial(_contiguity.table_figures, TABLE[:3], 8),
    "trace": lambda: partial(_contiguity.trace_figures, TABLE, np.array([2000, 3000]), 8),
    "copy": lambda: partial(_contiguity.copy_figures, TABLE, TABLE),
}


@once_or_on
@each_source
@pytest.mark.parametrize("call", FIGURES)
def test_figures_without_memory(call: str, source: str, once: bool) -> None:
    allocator = ALLOCATORS[source](_contiguity)
    expected = FIGURES[call]()()
    *errors, answer = outcomes(allocator, once, FIGURES[call])
    assert answer == expected
    assert len(errors) > 0


def test_a_table_that_is_refused_without_memory() -> None:
    allocator = of_python(_contiguity)
    table = TABLE - 100
    *_, answer = outcomes(allocator, True, lambda: partial(_contiguity.table_figures, table, 8))
    assert answer is ValueError


@once_or_on
def test_figures_to_add_without_memory(once: bool) -> None:
    """Nothing is added where the figures cannot be had."""
    allocator = of_cxx(_contiguity)
    figures, copies = Contiguity(tile=8), Copies()
    for call in (
        partial(figures.add, TABLE),
        partial(figures.add_all, [TABLE, [1, 2, 3]]),
        partial(copies.add, TABLE, TABLE[::-1]),
    ):
        before = [vars(figures).copy(), vars(copies).copy()]
        for answer in outcomes(allocator, once, lambda: call):  # noqa: B023
            assert ([vars(figures), vars(copies)] == before) == (answer is NoMemory)


class Unsummable:
    """A sum so far for which there is no memory once something is added to it."""

    def __radd__(self, other: object) -> int:
        raise MemoryError

    __add__ = __gt__ = __lt__ = __radd__


@pytest.mark.parametrize(
    ("figures", "add"),
    [
        (Contiguity(tile=8), lambda figures: figures.add([1, 2, 3])),
        (Contiguity(tile=8), lambda figures: figures.add_all([[1, 2, 3], [4]])),
        (Copies(), lambda copies: copies.add([1, 2, 3], [4, 5, 6])),
    ],
)
def test_sums_without_memory(figures: Any, add: Callable[[Any], None]) -> None:
    """Nothing is added where one of the sums cannot be had, whichever it is."""
    names = vars(figures).keys() - {"tile"}
    for name in names:
        before = {**vars(figures), name: Unsummable()}
        whole = getattr(figures, name)
        setattr(figures, name, before[name])
        with pytest.raises(MemoryError):
            add(figures)
        assert vars(figures) == before
        setattr(figures, name, whole)
    add(figures)
    assert figures.tables > 0
    assert names >= {"tables", "blocks", "neighbours", "runs", "runs_either", "longest_run"}
