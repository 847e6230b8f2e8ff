"""Ring 1: what vLLM, its tests and other people's code rely on, one contract for every queue."""

from __future__ import annotations

from typing import Any

import pytest
from implementations import MakeBlocks, assert_order, ids, walk


@pytest.mark.parametrize("order", [[], [0], [3], [0, 1, 2, 3], [5, 0, 3, 1], [900, 2, 77]])
def test_any_order_and_any_ids_at_construction(
    queue_class: Any, block_class: Any, order: list[int]
) -> None:
    queue = queue_class([block_class(i) for i in order])
    assert_order(queue, order)
    assert ids(queue.popleft_n(len(order))) == order
    assert_order(queue, [])


def test_popped_blocks_have_no_links(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(6)
    queue = queue_class(made)
    first = queue.popleft()
    assert first is made[0]
    taken = [first, *queue.popleft_n(3)]
    assert taken == made[:4]
    assert all(b.prev_free_block is None and b.next_free_block is None for b in taken)
    assert_order(queue, [4, 5])


def test_popleft_n_zero_is_an_empty_list(queue_class: Any, blocks: MakeBlocks) -> None:
    queue = queue_class(blocks(2))
    assert queue.popleft_n(0) == []
    assert queue_class([]).popleft_n(0) == []
    assert_order(queue, [0, 1])


def test_append_puts_last_and_prepend_n_puts_first(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(6)
    queue = queue_class(made)
    queue.popleft_n(6)
    queue.append(made[2])
    queue.append_n([made[5], made[0]])
    assert_order(queue, [2, 5, 0])
    queue.append_n([])
    assert_order(queue, [2, 5, 0])


@pytest.mark.needs("prepend_n")
def test_prepend_n_keeps_the_given_order(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(6)
    queue = queue_class(made[:1])
    queue.prepend_n([])
    queue.prepend_n(made[4:6])
    queue.prepend_n([made[2], made[1]])
    assert_order(queue, [2, 1, 4, 5, 0])
    empty = queue_class(blocks(0))
    empty.prepend_n(blocks(3))
    assert_order(empty, [0, 1, 2])


@pytest.mark.parametrize("container", [list, tuple])
def test_batches_may_be_any_sequence(queue_class: Any, blocks: MakeBlocks, container: Any) -> None:
    made = blocks(4)
    queue = queue_class(made)
    queue.append_n(container(queue.popleft_n(2)))
    assert_order(queue, [2, 3, 0, 1])


@pytest.mark.parametrize("position", [0, 2, 4])
def test_remove_takes_out_of_any_place(queue_class: Any, blocks: MakeBlocks, position: int) -> None:
    made = blocks(5)
    queue = queue_class(made)
    queue.remove(made[position])
    assert made[position].prev_free_block is None
    assert made[position].next_free_block is None
    assert_order(queue, [i for i in range(5) if i != position])


def test_links_are_served_live(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(4)
    queue = queue_class(made)
    assert queue.fake_free_list_head.prev_free_block is None
    assert queue.fake_free_list_tail.next_free_block is None
    assert queue.fake_free_list_head.block_id == queue.fake_free_list_tail.block_id == -1
    assert made[1].prev_free_block is made[0]
    assert made[1].next_free_block is made[2]
    assert made[3].next_free_block is queue.fake_free_list_tail
    queue.remove(made[2])
    assert made[1].next_free_block is made[3]
    assert made[3].prev_free_block is made[1]
    queue.append(made[2])
    assert made[2].prev_free_block is made[3]
    assert walk(queue) == [0, 1, 3, 2]


def test_repr_of_a_queued_block_reads_its_links(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(1)
    queue_class(made)
    assert "block_id=0" in repr(made[0])


def test_ids_never_seen_may_be_appended(queue_class: Any, block_class: Any) -> None:
    queue = queue_class([])
    late = [block_class(i) for i in (7, 3, 5_000)]
    queue.append(late[0])
    queue.append_n(late[1:])
    assert_order(queue, [7, 3, 5_000])
    assert queue.popleft_n(3) == late


def test_queues_that_share_ids_do_not_know_each_other(queue_class: Any, blocks: MakeBlocks) -> None:
    one, other = queue_class(blocks(4)), queue_class(blocks(4))
    one.popleft_n(3)
    other.remove(other.get_all_free_blocks()[1])
    assert_order(one, [3])
    assert_order(other, [0, 2, 3])


def test_num_free_blocks_is_assigned_from_outside(queue_class: Any, blocks: MakeBlocks) -> None:
    queue = queue_class(blocks(4))
    queue.num_free_blocks = 0
    with pytest.raises(AssertionError):
        queue.popleft_n(1)
    queue.num_free_blocks = 4
    assert ids(queue.popleft_n(2)) == [0, 1]
    assert_order(queue, [2, 3])


def test_popleft_of_an_empty_queue(queue_class: Any, blocks: MakeBlocks) -> None:
    queue = queue_class(blocks(1))
    queue.popleft()
    with pytest.raises(ValueError, match=r"^No free blocks available$"):
        queue.popleft()
    queue.num_free_blocks = 2
    with pytest.raises(AssertionError, match=r"num_free_blocks \(2\) is out of sync"):
        queue.popleft()


def test_popleft_n_of_more_than_there_are(queue_class: Any, blocks: MakeBlocks) -> None:
    queue = queue_class(blocks(3))
    with pytest.raises(AssertionError):
        queue.popleft_n(4)
    assert_order(queue, [0, 1, 2])


def test_remove_of_a_block_that_is_not_queued(queue_class: Any, blocks: MakeBlocks) -> None:
    queue = queue_class(blocks(3))
    taken = queue.popleft()
    with pytest.raises(RuntimeError, match=r"remove\(\) called on an invalid block: .*block_id=0"):
        queue.remove(taken)
    assert_order(queue, [1, 2])


def test_a_cut_tail_refuses_to_append(queue_class: Any, blocks: MakeBlocks) -> None:
    queue = queue_class([])
    queue.fake_free_list_tail.prev_free_block = None
    assert queue.fake_free_list_tail.prev_free_block is None
    with pytest.raises(AssertionError):
        queue.append_n(blocks(1))
    with pytest.raises(RuntimeError):
        queue.append(blocks(1)[0])
    assert queue.num_free_blocks == 0
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    queue.fake_free_list_tail.prev_free_block = queue.fake_free_list_head
    queue.append_n(blocks(2))
    assert_order(queue, [0, 1])


@pytest.mark.needs("prepend_n")
def test_a_cut_head_refuses_to_prepend_and_to_list(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(3)
    queue = queue_class(made[:2])
    queue.fake_free_list_head.next_free_block = None
    with pytest.raises(AssertionError):
        queue.prepend_n(made[2:])
    with pytest.raises(RuntimeError):
        queue.get_all_free_blocks()
    with pytest.raises(AssertionError):
        queue.popleft()
    queue.fake_free_list_head.next_free_block = made[0]
    assert_order(queue, [0, 1])


@pytest.mark.needs("iter_blocks_after")
def test_iter_blocks_after_a_cursor(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(5)
    queue = queue_class(made)
    assert ids(queue.iter_blocks_after(None)) == [0, 1, 2, 3, 4]
    assert ids(queue.iter_blocks_after(made[2])) == [3, 4]
    assert ids(queue.iter_blocks_after(made[4])) == []
    assert ids(queue.iter_blocks_after(queue.fake_free_list_head)) == [0, 1, 2, 3, 4]
    assert ids(queue.iter_blocks_after(queue.fake_free_list_tail)) == []
    queue.remove(made[2])
    assert ids(queue.iter_blocks_after(made[2])) == []


@pytest.mark.needs("iter_blocks_after")
def test_iter_blocks_after_is_lazy_and_survives_changes(
    queue_class: Any, blocks: MakeBlocks
) -> None:
    made = blocks(6)
    queue = queue_class(made)
    walk_of = queue.iter_blocks_after(None)
    queue.remove(made[0])  # made before the first step, which must see it
    assert next(walk_of) is made[1]
    queue.remove(made[2])
    assert next(walk_of) is made[3]
    queue.append(made[2])
    assert ids(walk_of) == [4, 5, 2]
    assert next(walk_of, None) is None

    walk_of = queue.iter_blocks_after(None)
    standing_on = next(walk_of)
    queue.remove(standing_on)
    assert list(walk_of) == []

    walk_of = queue.iter_blocks_after(None)
    next(walk_of)
    del walk_of  # abandoned in the middle, as the lazy offload scheduler does
    assert_order(queue, [3, 4, 5, 2])


@pytest.mark.needs("iter_blocks_after")
def test_a_walk_follows_a_block_that_was_queued_again(queue_class: Any, blocks: MakeBlocks) -> None:
    made = blocks(4)
    queue = queue_class(made)
    walk_of = queue.iter_blocks_after(None)
    assert next(walk_of) is made[0]
    queue.remove(made[0])
    queue.append(made[0])
    assert list(walk_of) == []
    assert ids(queue.iter_blocks_after(made[3])) == [0]


def test_blocks_are_compared_by_identity(queue_class: Any, block_class: Any) -> None:
    """Comparing two queued dataclass blocks would follow their links without end."""
    compared = []

    class Watched(block_class):  # type: ignore[misc]
        def __eq__(self, other: object) -> bool:
            compared.append((self, other))
            return True

    made = [Watched(i) for i in range(3)]
    queue = queue_class(made)
    queue.remove(made[1])
    queue.append(made[1])
    assert queue.popleft_n(2)[1] is made[2]
    queue.append(made[0])
    assert_order(queue, [1, 0])
    assert compared == []
