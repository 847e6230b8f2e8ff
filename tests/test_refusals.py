"""Where vLLM's class silently corrupts itself, ours raise and stay as they were."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from implementations import MakeBlocks, SlotBlock, assert_order

Mistake = Callable[[Any, list[Any]], Any]

# The queue holds 1, 2, 3; block 0 is in use.
MISTAKES: dict[str, tuple[Mistake, type[Exception], str]] = {
    "popleft_n negative": (lambda q, b: q.popleft_n(-1), ValueError, "-1"),
    "popleft_n float": (lambda q, b: q.popleft_n(1.5), TypeError, "integer"),
    "popleft_n far too many": (lambda q, b: q.popleft_n(2**70), AssertionError, "only 3 blocks"),
    "popleft_n far too few": (lambda q, b: q.popleft_n(-(2**70)), ValueError, "negative"),
    "popleft_n zero as a float": (lambda q, b: q.popleft_n(0.0), TypeError, "integer"),
    "append queued": (lambda q, b: q.append(b[2]), RuntimeError, "block 2 is already queued"),
    "append_n queued": (lambda q, b: q.append_n([b[0], b[2]]), RuntimeError, "block 2 is already"),
    "prepend_n queued": (
        lambda q, b: q.prepend_n([b[0], b[3]]),
        RuntimeError,
        "block 3 is already",
    ),
    "append_n twice": (lambda q, b: q.append_n([b[0], b[0]]), RuntimeError, "block 0 comes twice"),
    "prepend_n twice": (
        lambda q, b: q.prepend_n([b[0], b[0]]),
        RuntimeError,
        "block 0 comes twice",
    ),
    "append foreign": (
        lambda q, b: q.append(type(b[0])(0)),
        RuntimeError,
        "block 0 is foreign",
    ),
    "append_n foreign": (
        lambda q, b: q.append_n([b[0], type(b[0])(9), type(b[0])(3)]),
        RuntimeError,
        "block 3 is foreign",
    ),
    "append copy": (lambda q, b: q.append(copy.copy(b[1])), RuntimeError, "block 1 is foreign"),
    "append head": (lambda q, b: q.append(q.fake_free_list_head), RuntimeError, "-1"),
    "append_n tail": (lambda q, b: q.append_n([b[0], q.fake_free_list_tail]), RuntimeError, "-1"),
    "append negative id": (lambda q, b: q.append(type(b[0])(-1)), RuntimeError, "-1"),
    "append huge id": (lambda q, b: q.append(type(b[0])(2**28)), RuntimeError, "268435456"),
    "append id of a bool": (lambda q, b: q.append(type(b[0])(True)), TypeError, "True"),
    "append id of no number": (lambda q, b: q.append(type(b[0])("7")), TypeError, "'7'"),
    "append None": (lambda q, b: q.append(None), TypeError, "NoneType"),
    "append_n None in batch": (lambda q, b: q.append_n([b[0], None]), TypeError, "NoneType"),
    "append_n generator": (lambda q, b: q.append_n(x for x in [b[0]]), TypeError, "len"),
    "append_n None": (lambda q, b: q.append_n(None), TypeError, "len"),
    "remove in use": (lambda q, b: q.remove(b[0]), RuntimeError, "invalid block"),
    "remove head": (lambda q, b: q.remove(q.fake_free_list_head), RuntimeError, "invalid block"),
    "remove foreign": (lambda q, b: q.remove(type(b[0])(2)), RuntimeError, "invalid block"),
    "remove of another queue": (
        lambda q, b: q.remove(type(q)([type(b[0])(2)]).get_all_free_blocks()[0]),
        RuntimeError,
        "invalid block",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_and_changes_nothing(
    strict_class: Any, blocks: MakeBlocks, mistake: str
) -> None:
    call, error, text = MISTAKES[mistake]
    made = blocks(4)
    queue = strict_class(made)
    queue.popleft()
    with pytest.raises(error, match=text):
        call(queue, made)
    assert_order(queue, [1, 2, 3])
    assert made[0].prev_free_block is None
    assert queue.stats()["known"] == 4
    queue.append(made[0])
    assert_order(queue, [1, 2, 3, 0])


def test_a_block_of_another_queue_is_refused(strict_class: Any, block_class: Any) -> None:
    theirs = [block_class(i) for i in range(5, 8)]
    other = strict_class(theirs)
    queue = strict_class([block_class(i) for i in range(3)])
    with pytest.raises(RuntimeError, match="block 6 is queued in another queue"):
        queue.append(theirs[1])
    with pytest.raises(RuntimeError, match="block 5 is queued in another queue"):
        queue.append_n([block_class(9), theirs[0]])
    assert_order(queue, [0, 1, 2])
    assert_order(other, [5, 6, 7])
    other.remove(theirs[1])
    queue.append(theirs[1])
    assert_order(queue, [0, 1, 2, 6])


def test_a_count_that_is_too_high_never_hands_out_an_end(
    strict_class: Any, blocks: MakeBlocks
) -> None:
    queue = strict_class(blocks(2))
    queue.num_free_blocks = 5
    with pytest.raises(RuntimeError, match="num_free_blocks says 5 but 2 blocks are queued"):
        queue.popleft_n(3)
    assert queue.num_free_blocks == 5
    assert queue.check() == "num_free_blocks is 5 but 2 are queued"
    queue.num_free_blocks = 2
    assert_order(queue, [0, 1])


@pytest.mark.parametrize("count", ["3", None, 1.5])
def test_num_free_blocks_is_a_whole_number(blocks: MakeBlocks, count: Any) -> None:
    from pyblockpool import FreeBlockQueue

    queue = FreeBlockQueue(blocks(2))
    with pytest.raises(TypeError):
        queue.num_free_blocks = count
    assert_order(queue, [0, 1])


@pytest.mark.parametrize("count", [2**61, -(2**61), 10**30, -(10**30)])
def test_num_free_blocks_is_a_number_of_blocks(blocks: MakeBlocks, count: int) -> None:
    from pyblockpool import FreeBlockQueue

    queue = FreeBlockQueue(blocks(2))
    with pytest.raises(ValueError, match=f"num_free_blocks: {count} is not a number of blocks"):
        queue.num_free_blocks = count
    assert_order(queue, [0, 1])


@pytest.mark.parametrize("bad", ["", "fifo", "LRU", "sort", "extents", None, 5, b"lru", []])
def test_an_unknown_policy_is_refused_by_name(strict_class: Any, bad: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{bad!r} is not one of lru, sorted, extent")):
        strict_class([], policy=bad)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda c: [c(0), c(1), c(0)], RuntimeError, "0"),
        (lambda c: [c(0), c(-1)], RuntimeError, "-1"),
        (lambda c: [c(0), "block"], TypeError, "str"),
        (lambda c: [c(0), c(None)], TypeError, "None"),
    ],
    ids=["one id twice", "an end", "no block", "no id"],
)
def test_construction_is_all_or_nothing(
    strict_class: Any, block_class: Any, make: Any, error: type[Exception], text: str
) -> None:
    made = make(block_class)
    with pytest.raises(error, match=text):
        strict_class(made)
    assert made[0].prev_free_block is None
    assert_order(strict_class(made[:1]), [0])


def test_construction_from_no_iterable(strict_class: Any) -> None:
    with pytest.raises(TypeError):
        strict_class(5)


def test_a_new_queue_takes_its_blocks_over(strict_class: Any, blocks: MakeBlocks) -> None:
    """vLLM's class leaves both queues in pieces; ours moves the blocks."""
    made = blocks(5)
    old = strict_class(made)
    new = strict_class([made[3], made[1]])
    assert_order(new, [3, 1])
    assert_order(old, [0, 2, 4])


def test_object_with_a_lying_class_is_no_block(blocks: MakeBlocks) -> None:
    """`isinstance` believes a mock with a spec; memory at fixed offsets must not be read of it."""
    from unittest.mock import Mock

    from pyblockpool import FreeBlockQueue

    queue = FreeBlockQueue([SlotBlock(0)])
    liar = Mock(spec=SlotBlock)
    assert isinstance(liar, SlotBlock)
    with pytest.raises(RuntimeError, match="invalid block"):
        queue.remove(liar)
    with pytest.raises(TypeError):
        SlotBlock.__dict__["prev_free_block"].__get__(liar, SlotBlock)
    with pytest.raises((TypeError, RuntimeError)):
        queue.append(liar)
    assert_order(queue, [0])
