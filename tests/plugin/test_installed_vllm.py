"""Ring 4 on the installed vLLM: the swap, drift in both directions, pools block for block."""

from __future__ import annotations

import gc
import inspect
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from implementations import HAS_VLLM
from pools import free, give_hash, order, pool, splits_by_hash, touch

from pyblockpool import FreeBlockQueue
from pyblockpool.plugin import entry, surface
from pyblockpool.settings import QUEUE_VARIABLE, Settings

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")

EXTENSIONS = {"reorder", "forget_hashes", "grow_after", "check", "stats"}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()


@pytest.mark.parametrize("trace", [None, "trace.jsonl"])
@pytest.mark.parametrize("policy", ["lru", "sorted", "extent"])
def test_probe_finds_all_that_is_needed(policy: str, trace: str | None) -> None:
    if policy != "lru" and not splits_by_hash():
        pytest.skip("placement needs vLLM 0.24.0 or later")
    settings = Settings("native", policy, trace=trace)
    findings = surface.probe(settings)
    assert len(findings) == len(surface.checks(settings))
    assert [finding.sentence for finding in findings if finding.error] == []


def test_our_members_and_those_of_vllm_have_not_drifted_apart() -> None:
    """If this fails after an update of vLLM, its queue has changed its contract.

    A member that only vLLM has: read what it does, give it to `reference.py` and `queue.pyx`, add
    it to `surface.QUEUE_METHODS` and `LATER_QUEUE_METHODS`. A member that only we have: see when
    it went, and whether older releases that are still supported need it.
    """
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    def public(thing: Any) -> set[str]:
        return {name for name in dir(thing) if not name.startswith("_")}

    theirs, ours = public(FreeKVCacheBlockQueue([])), public(FreeBlockQueue([]))
    assert theirs - ours == set()
    later = {name for name in surface.LATER_QUEUE_METHODS if name not in theirs}
    assert ours - theirs - later == EXTENSIONS
    for name in theirs & set(surface.QUEUE_METHODS):
        signatures = [
            list(inspect.signature(getattr(cls, name)).parameters)
            for cls in (FreeKVCacheBlockQueue, FreeBlockQueue)
        ]
        assert signatures[0] == signatures[1], name


def test_switching_on_and_off(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    assert type(pool(8, True).free_block_queue) is FreeBlockQueue
    assert QUEUE_VARIABLE in envs.environment_variables
    gc.collect()
    entry.restore()
    assert QUEUE_VARIABLE not in envs.environment_variables
    assert type(pool(8, True).free_block_queue) is not FreeBlockQueue


def test_one_log_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("vllm.plugins.pyblockpool")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    with caplog.at_level(logging.INFO, logger.name):
        entry.register()
        entry.register()
    # By identity: loggers of older releases hand the same record to caplog twice.
    records = {id(record): record for record in caplog.records if record.name == logger.name}
    lines = list(records.values())
    assert len(lines) == 1
    assert surface.vllm_version() in lines[0].getMessage()


def life_of_a_pool(seed: int, caching: bool) -> list[Any]:
    """All that can be seen of a pool in a life of allocations, hits, releases and evictions."""
    chance = random.Random(seed)
    subject = pool(64, caching)
    requests: list[list[Any]] = []
    seen: list[Any] = []
    hashes = iter(range(1, 10_000))
    for _ in range(300):
        what = chance.random()
        n = chance.randint(1, 12)
        if what < 0.45 and n <= subject.get_num_free_blocks():
            taken = subject.get_new_blocks(n)
            seen.append([block.block_id for block in taken])
            for block in taken[: chance.randint(0, n)] if caching else ():
                give_hash(subject, block, next(hashes))
            requests.append(taken)
        elif what < 0.8 and requests:
            free(subject, requests.pop(chance.randrange(len(requests))))
        elif what < 0.9 and caching:
            cached = [block for block in subject.blocks if block.block_hash is not None]
            hit = chance.sample(cached, min(3, len(cached)))
            touch(subject, hit)
            requests.append(hit)
        elif what < 0.95 and caching:
            subject.evict_blocks({chance.randrange(1, 64) for _ in range(4)})
        elif chance.random() < 0.2:
            for request in requests:
                free(subject, request)
            requests.clear()
            seen.append(subject.reset_prefix_cache())
        seen.append((order(subject), subject.get_num_free_blocks(), subject.get_usage()))
        seen.append([(block.ref_cnt, block.block_hash) for block in subject.blocks])
        check: Callable[[], str] = getattr(subject.free_block_queue, "check", str)
        assert check() == ""
    return seen


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])
@pytest.mark.parametrize("seed", range(8))
def test_pools_are_equal_block_for_block(
    seed: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = life_of_a_pool(seed, caching)
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()
    assert life_of_a_pool(seed, caching) == stock
    assert len(stock) > 300


def test_subclasses_and_pools_of_one_block(native: None) -> None:
    from vllm.v1.core.block_pool import BlockPool

    class Wider(BlockPool):  # type: ignore[misc]
        pass

    assert type(pool(4, True, Wider).free_block_queue) is FreeBlockQueue
    lonely = pool(1, False)
    assert lonely.get_num_free_blocks() == 0
    assert lonely.get_usage() == 0
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        lonely.get_new_blocks(1)


def test_null_blocks_may_be_freed(native: None) -> None:
    subject = pool(6, True)
    taken = subject.get_new_blocks(2)
    subject.free_blocks([subject.null_block, taken[0], subject.null_block, taken[1]])
    assert 0 not in order(subject)
    assert subject.free_block_queue.check() == ""


def test_blocks_of_several_pools_in_one_release(native: None) -> None:
    one, other = pool(6, False), pool(6, False)
    if not hasattr(one.blocks[1], "pool"):
        pytest.skip("vLLM's blocks know their pool since 0.30.0")
    mine, theirs = one.get_new_blocks(2), other.get_new_blocks(3)
    one.free_blocks([mine[0], *theirs, mine[1]])
    for subject in (one, other):
        assert sorted(order(subject)) == [1, 2, 3, 4, 5]
        assert subject.free_block_queue.check() == ""


def lazy_walk() -> list[list[int]]:
    """As the lazy CPU offload walks the queue: a cursor that stays, hits while it stands there."""
    subject = pool(10, True)
    cursor = None
    visited = []
    for turn in range(4):
        for covered, block in enumerate(subject.free_block_queue.iter_blocks_after(cursor)):
            if covered >= 2:
                break
            cursor = block
            visited.append([turn, block.block_id])
        touch(subject, [cursor])
        if turn != 1:
            subject.free_blocks([cursor])
    visited.append(order(subject))
    return visited


def test_the_lazy_walk_keeps_a_cursor_across_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    if not hasattr(FreeKVCacheBlockQueue, "iter_blocks_after"):
        pytest.skip("vLLM walks raw links before 0.26.0")
    stock = lazy_walk()
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()
    assert lazy_walk() == stock
    assert stock[:2] == [[0, 1], [0, 2]]


def test_the_raw_walk_of_older_releases(native: None) -> None:
    subject = pool(6, True)
    queue = subject.free_block_queue
    node = queue.fake_free_list_head.next_free_block
    seen = []
    while node is not None and node is not queue.fake_free_list_tail:
        seen.append(node.block_id)
        node = node.next_free_block
    assert seen == [1, 2, 3, 4, 5]
