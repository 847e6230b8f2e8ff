"""Public bug reports as tests, on the installed vLLM's pool with its queue and with ours, under
every policy.
"""

from __future__ import annotations

from typing import Any

import pytest
from implementations import HAS_VLLM, ids
from pools import (
    appends_without_caching,
    free,
    give_hash,
    order,
    pool,
    splits_by_hash,
    touch,
)

from pyblockpool.contiguity import Contiguity
from pyblockpool.plugin import entry
from pyblockpool.settings import QUEUE_VARIABLE

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")


VALUES = ["vllm", "native", "native:sorted", "native:extent"]


@pytest.fixture(params=VALUES)
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A value of the variable, or vLLM's own queue."""
    value = str(request.param)
    if ":" in value and not splits_by_hash():
        pytest.skip("placement needs vLLM 0.24.0 or later")
    if value != "vllm":
        monkeypatch.setenv(QUEUE_VARIABLE, value)
        entry.register()
    return value


def test_vllm_31371_the_order_of_what_was_released(queue: str) -> None:
    """vllm#31371, #51482: this order once changed silently and crashed TPU cores."""
    subject = pool(11, False)
    tables = []
    for _ in range(3):
        taken = subject.get_new_blocks(5)
        tables.append(ids(taken))
        free(subject, taken)
    upwards, downwards = [1, 2, 3, 4, 5], [5, 4, 3, 2, 1]
    if appends_without_caching():
        # A placement policy takes them for cached ones: the others first, then LRU.
        others = [8, 9, 10, 6, 7] if queue == "native:extent" else [6, 7, 8, 9, 10]
        assert tables == [upwards, others, upwards if queue == "native:sorted" else downwards]
    else:
        assert tables == [upwards, upwards if ":" in queue else downwards, upwards]


def test_vllm_32290_contiguity_is_never_a_reason_to_refuse(queue: str) -> None:
    subject = pool(11, False)
    touch(subject, [subject.blocks[i] for i in (2, 4, 6, 8, 10)])
    assert ids(subject.get_new_blocks(5)) == [1, 3, 5, 7, 9]


def test_vllm_42571_one_block_freed_twice_with_two_references(queue: str) -> None:
    """vllm#42571, dynamo#13398: legal, and enqueued once."""
    subject = pool(6, True)
    (block,) = subject.get_new_blocks(1)
    touch(subject, [block])
    if not splits_by_hash():
        # vLLM before 0.24 counts both references down first, and enqueues the block twice.
        if queue == "vllm":
            pytest.skip("its own queue takes that, and is broken from there on")
        with pytest.raises(RuntimeError, match=r"append_n\(\): block 1 comes twice"):
            subject.free_blocks([block, block])
        assert subject.free_block_queue.check() == ""
        return
    subject.free_blocks([block, block])
    assert order(subject).count(block.block_id) == 1
    assert subject.get_num_free_blocks() == 5


def test_kvcached_398_block_zero_is_first_and_never_again(queue: str) -> None:
    subject = pool(8, False)
    assert subject.null_block.block_id == 0
    for _ in range(5):
        taken = subject.get_new_blocks(7)
        assert 0 not in ids(taken)
        free(subject, taken)


def test_llm_d_704_the_tail_of_a_chain_is_evicted_first(queue: str) -> None:
    subject = pool(4, True)
    chain = subject.get_new_blocks(3)
    for block in chain:
        give_hash(subject, block)
    free(subject, chain)
    assert ids(subject.get_new_blocks(1)) == [3]
    assert subject.blocks[3].block_hash is None
    assert subject.blocks[2].block_hash is not None


def test_vllm_55434_a_fresh_pool_gives_one_run(queue: str) -> None:
    """vllm#55434: 642 blocks of a fresh pool took one descriptor in each of 101 regions."""
    subject = pool(1000, True)
    fresh = Contiguity(tile=8)
    fresh.add(ids(subject.get_new_blocks(642)))
    assert (fresh.blocks, fresh.runs, fresh.longest_run) == (642, 1, 642)
    assert fresh.descriptors(101) == 101


def test_vllm_55434_each_run_is_a_descriptor_in_each_region(queue: str) -> None:
    """Of 101 stretches, each followed by a block that somebody else holds."""
    subject = pool(1 + 101 * 4, False)
    touch(subject, subject.blocks[4::4])
    scattered = Contiguity(tile=8)
    scattered.add(ids(subject.get_new_blocks(303)))
    assert (scattered.blocks, scattered.runs) == (303, 101)
    assert (scattered.descriptors(1), scattered.descriptors(101)) == (101, 101 * 101)


@pytest.mark.skipif(not splits_by_hash(), reason="free_blocks splits by hash since vLLM 0.24.0")
def test_vllm_42656_unhashed_blocks_go_first_and_chains_tail_first(queue: str) -> None:
    subject = pool(11, True)
    taken = subject.get_new_blocks(5)
    for block in taken[:4]:
        give_hash(subject, block)
    free(subject, taken)
    assert order(subject) == [5, 6, 7, 8, 9, 10, 4, 3, 2, 1]


def test_vllm_43302_a_block_taken_out_for_good_stays_out(queue: str) -> None:
    subject = pool(11, True)
    subject.free_block_queue.remove(subject.blocks[10])
    for n in (9, 4, 7):
        taken = subject.get_new_blocks(n)
        assert 10 not in ids(taken)
        free(subject, taken)
    assert subject.reset_prefix_cache() is False
    assert sorted(order(subject)) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_dynamo_11600_the_class_of_a_pool_is_swapped_at_run_time(queue: str) -> None:
    subject = pool(8, True)
    taken = subject.get_new_blocks(4)
    for block in taken[:2]:
        give_hash(subject, block)
    free(subject, taken)

    class Restoring(type(subject)):  # type: ignore[misc]
        def protect(self, blocks: Any) -> None:
            """Queue restored blocks anew, last in line."""
            for block in blocks:
                self.free_block_queue.remove(block)
            self.free_block_queue.append_n(blocks)

    subject.__class__ = Restoring
    subject.protect(taken[:2])
    assert order(subject)[-2:] == ids(taken[:2])
    evicted = subject.get_new_blocks(5)
    assert not set(ids(evicted)) & set(ids(taken[:2]))
    assert all(block.block_hash is not None for block in taken[:2])


def test_vllm_56109_unpinned_blocks_are_the_last_resort(queue: str) -> None:
    subject = pool(8, True)
    if not hasattr(subject, "unpin_blocks"):
        pytest.skip("blocks can be unpinned since vLLM 0.30.0")
    taken = subject.get_new_blocks(3)
    reused: list[int] = []
    subject.unpin_blocks([taken[1]], lambda block: reused.append(block.block_id))
    free(subject, [taken[0], taken[2]])
    assert order(subject)[-1] == 2
    assert 2 not in ids(subject.get_new_blocks(6))
    assert reused == []
    assert ids(subject.get_new_blocks(1)) == [2]
    assert reused == [2]
