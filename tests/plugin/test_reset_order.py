"""The order reset on the installed vLLM's own pools, with its queue and with ours."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import pickle
import random
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from implementations import HAS_VLLM, ids
from pools import free, give_hash, order, pool, splits_by_hash, touch

from pyblockpool import FreeBlockQueue
from pyblockpool.plugin import entry
from pyblockpool.plugin.order import order_by_id
from pyblockpool.settings import QUEUE_VARIABLE

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")

Warnings = Callable[[], list[str]]


@pytest.fixture(params=["python", "native"])
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(QUEUE_VARIABLE, request.param)
    entry.register()
    return str(request.param)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Warnings:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def scramble(subject: Any, seed: int = 40244, hashes: bool = True) -> None:
    """Many simulated requests that allocate, grow, hit, and finish out of order."""
    chance = random.Random(seed)
    requests: list[list[Any]] = []
    number = 0
    for _ in range(400):
        n = chance.randint(1, 12)
        if chance.random() < 0.6 and n <= subject.get_num_free_blocks():
            taken = subject.get_new_blocks(n)
            for block in taken[:-1] if hashes else ():
                number += 1
                give_hash(subject, block, number)
            requests.append(taken)
        elif requests:
            free(subject, requests.pop(chance.randrange(len(requests))))
    for request in requests:
        free(subject, request)


def everything(subject: Any) -> dict[str, Any]:
    """All that can be seen of a pool, but for the order."""
    return {
        "blocks": [(b.block_id, b.ref_cnt, b.block_hash, b.is_null) for b in subject.blocks],
        "cache": len(subject.cached_block_hash_to_block),
        "events": list(subject.kv_event_queue),
        "free": subject.get_num_free_blocks(),
        "usage": subject.get_usage(),
        "queue": id(subject.free_block_queue),
        "metrics": metrics_of(subject),
    }


def metrics_of(subject: Any) -> Any:
    collector = subject.metrics_collector
    return collector and (
        {block_id: dict(vars(state)) for block_id, state in collector.block_metrics.items()},
        list(collector._eviction_events),
    )


def watched_pool(num_blocks: int) -> Any:
    """A pool that records KV events, and metrics of every block."""
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    subject = pool(num_blocks, True)
    subject.enable_kv_cache_events = True
    subject.metrics_collector = KVCacheMetricsCollector(sample_rate=1.0)
    scramble(subject)
    assert len(subject.kv_event_queue) > 0
    assert len(subject.metrics_collector.block_metrics) > 0
    return subject


def test_the_test_plan_of_the_rfc(queue: str) -> None:
    subject = pool(128, True)
    scramble(subject)
    assert subject.reset_prefix_cache()
    shuffled = order(subject)
    assert shuffled != sorted(shuffled), "an ordinary reset of the cache leaves the order"
    assert subject.reset_free_block_queue_order() is True
    assert [subject.free_block_queue.popleft().block_id for _ in range(127)] == [*range(1, 128)]


def test_nothing_but_the_order_changes(queue: str) -> None:
    subject = watched_pool(64)
    before = everything(subject)
    assert before["cache"] > 0
    assert subject.reset_free_block_queue_order() is True
    assert everything(subject) == before
    assert order(subject) == list(range(1, 64))


@pytest.mark.parametrize("held", [1, 5])
def test_a_held_block_refuses_and_nothing_changes(
    queue: str, held: int, warnings: Warnings
) -> None:
    """SkyRL#1824, NeMo-RL#3839."""
    subject = watched_pool(64)
    taken = subject.get_new_blocks(held)
    before, before_order = everything(subject), order(subject)
    assert before_order != sorted(before_order)
    assert subject.reset_free_block_queue_order() is False
    assert everything(subject) == before
    assert order(subject) == before_order
    (warning,) = warnings()
    assert f"({held})" in warning
    free(subject, taken)
    assert subject.reset_free_block_queue_order() is True
    assert order(subject) == list(range(1, 64))


def test_a_hit_on_a_free_block_holds_it(queue: str) -> None:
    subject = pool(8, True)
    (block,) = subject.get_new_blocks(1)
    give_hash(subject, block)
    free(subject, [block])
    touch(subject, [block])
    assert subject.reset_free_block_queue_order() is False


def test_with_the_reset_of_the_cache(queue: str, warnings: Warnings) -> None:
    """The RFC's second form: in order only if the reset succeeded, and only if asked."""
    subject = pool(64, True)
    scramble(subject)
    shuffled = order(subject)
    assert subject.reset_prefix_cache() is True
    assert order(subject) == shuffled
    (block,) = subject.get_new_blocks(1)
    shuffled = order(subject)
    assert subject.reset_prefix_cache(reorder_free_queue=True) is False
    assert order(subject) == shuffled
    assert len(warnings()) == 1, "that of vLLM alone: the order was not asked for any more"
    free(subject, [block])
    assert subject.reset_prefix_cache(reorder_free_queue=True) is True
    assert order(subject) == list(range(1, 64))
    assert all(block.block_hash is None for block in subject.blocks)


def test_the_null_block_stays_out(queue: str) -> None:
    """kvcached#398"""
    subject = pool(16, True)
    assert subject.null_block.block_id == 0
    for _ in range(3):
        scramble(subject)
        assert subject.reset_free_block_queue_order()
        assert order(subject)[0] == 1
        assert 0 not in ids(subject.get_new_blocks(15))
        free(subject, subject.blocks[1:])


def test_a_block_taken_out_for_good_stays_out(queue: str) -> None:
    """vllm#43302; as sink blocks of vLLM 0.14 to 0.29 are taken: by whom, nobody knows."""
    subject = pool(11, True)
    subject.free_block_queue.remove(subject.blocks[10])
    sink = subject.free_block_queue.popleft_n(2)
    scramble(subject)
    assert order(subject) != list(range(3, 10))
    assert subject.reset_free_block_queue_order() is True
    assert order(subject) == list(range(3, 10))
    for block in (subject.blocks[10], *sink):
        assert (block.prev_free_block, block.next_free_block) == (None, None)
    (taken,) = subject.get_new_blocks(1)
    assert subject.reset_free_block_queue_order() is False
    free(subject, [taken])


def test_unpinned_blocks_stay_the_last_resort(queue: str) -> None:
    """vllm#56109"""
    subject = pool(8, True)
    if not hasattr(subject, "unpin_blocks"):
        pytest.skip("blocks can be unpinned since vLLM 0.30.0")
    taken = subject.get_new_blocks(4)
    reused: list[int] = []
    subject.unpin_blocks([taken[2], taken[0]], lambda block: reused.append(block.block_id))
    free(subject, [taken[1], taken[3]])
    for _ in range(2):
        assert subject.reset_free_block_queue_order() is True
        assert order(subject) == [2, 4, 5, 6, 7, 3, 1]
    assert reused == []
    assert ids(subject.get_new_blocks(6)) == [2, 4, 5, 6, 7, 3]
    assert reused == [3]
    assert ids(subject.get_new_blocks(1)) == [1]
    assert reused == [3, 1]


def test_the_queue_goes_on_as_ever(queue: str) -> None:
    """After a reset of the order, what was shuffled by hand comes out as vLLM's own would do it."""
    subject = pool(32, True)
    scramble(subject)
    subject.reset_free_block_queue_order()
    fresh = pool(32, True)
    for each in (subject, fresh):
        each.reset_prefix_cache()
        scramble(each, seed=7)
    assert order(subject) == order(fresh)
    assert [b.ref_cnt for b in subject.blocks] == [b.ref_cnt for b in fresh.blocks]


def test_pools_with_nothing_to_reorder(queue: str) -> None:
    for size in (1, 2):
        subject = pool(size, False)
        assert subject.reset_free_block_queue_order() is True
        assert order(subject) == list(range(1, size))
        stats = subject.free_block_queue_stats()
        assert (stats["free"], stats["runs"], stats["longest_run"]) == (size - 1,) * 3


def test_a_pool_of_another_queue_is_reordered_by_its_own_methods(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that was built before the plugin, or under another plugin's queue."""
    from vllm.v1.core import block_pool, kv_cache_utils

    class Other(kv_cache_utils.FreeKVCacheBlockQueue):  # type: ignore[misc]
        pass

    monkeypatch.setattr(block_pool, "FreeKVCacheBlockQueue", Other)
    subject = pool(32, True)
    monkeypatch.undo()
    monkeypatch.setenv(QUEUE_VARIABLE, queue)
    scramble(subject)
    assert order(subject) != list(range(1, 32))
    assert subject.reset_free_block_queue_order() is True
    assert order(subject) == list(range(1, 32))
    stats = subject.free_block_queue_stats()
    assert stats["implementation"].endswith("Other")
    assert (stats["free"], stats["runs"]) == (31, 1)


def coordinator_of(*pools: Any) -> Any:
    """vLLM's coordinator as far as the reset goes: its managers, some with the same pool."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache

    subject = KVCacheCoordinatorNoPrefixCache.__new__(KVCacheCoordinatorNoPrefixCache)
    subject.block_pool = pools[0]
    subject.single_type_managers = tuple(SimpleNamespace(block_pool=p) for p in pools)
    return subject


def test_each_distinct_pool_once(queue: str, warnings: Warnings) -> None:
    gpu, host = pool(32, True), pool(16, True)
    subject = coordinator_of(gpu, host, gpu, host, SimpleNamespace())
    for each in (gpu, host):
        scramble(each)
    taken = host.get_new_blocks(3)
    before = order(gpu), order(host)
    assert subject.reset_free_block_queue_order() is False
    assert (order(gpu), order(host)) == before, "all of them or none"
    (warning,) = warnings()
    assert "(3)" in warning
    free(host, taken)
    assert subject.reset_free_block_queue_order() is True
    assert order(gpu) == list(range(1, 32))
    assert order(host) == list(range(1, 16))
    stats = subject.free_block_queue_stats()
    assert stats["num_blocks"] == 32
    assert [other["num_blocks"] for other in stats["other_pools"]] == [16]


def test_where_vllm_keeps_the_cursor_of_a_lazy_offload() -> None:
    """If this fails, see where it has gone, and let `reset._offloads` find it there."""
    offload = pytest.importorskip("vllm.v1.simple_kv_offload.manager")
    connectors = "vllm.distributed.kv_transfer.kv_connector.v1"
    simple = importlib.import_module(f"{connectors}.simple_cpu_offload_connector")
    multi = importlib.import_module(f"{connectors}.multi_connector")
    for cls, name in (
        (offload.SimpleCPUOffloadScheduler, "_cursor"),
        (simple.SimpleCPUOffloadConnector, "scheduler_manager"),
        (multi.MultiConnector, "_connectors"),
    ):
        assert name in inspect.unwrap(cls.__init__).__code__.co_names, cls


def test_no_queue_at_all_is_no_success(queue: str) -> None:
    subject = coordinator_of(SimpleNamespace())
    for call in (subject.reset_free_block_queue_order, subject.free_block_queue_stats):
        with pytest.raises(NotImplementedError, match="SimpleNamespace keeps its free blocks"):
            call()


def test_stats(queue: str) -> None:
    subject = pool(10, True)
    taken = subject.get_new_blocks(4)
    for block in taken[1:3]:
        give_hash(subject, block)
    for block in taken[1:]:
        subject.free_blocks([block])
    # The one without a hash is the first, in older releases the last.
    expected = [4, 5, 6, 7, 8, 9, 2, 3] if splits_by_hash() else [5, 6, 7, 8, 9, 2, 3, 4]
    assert order(subject) == expected
    stats = subject.free_block_queue_stats()
    assert stats == {
        "implementation": "native" if queue == "native" else "vllm",
        "policy": "lru",
        "num_blocks": 10,
        "in_use": 1,
        "free": 8,
        "unhashed": 6,
        "runs": 2,
        "longest_run": 6 if splits_by_hash() else 5,
        "other_pools": [],
    }


def test_the_same_figures_from_both_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(value: str) -> list[dict[str, Any]]:
        monkeypatch.setenv(QUEUE_VARIABLE, value)
        entry.register()
        seen = []
        for seed in range(5):
            subject = pool(64, True)
            scramble(subject, seed)
            seen.append(subject.free_block_queue_stats())
            seen[-1].pop("implementation")
        native = type(subject.free_block_queue) is FreeBlockQueue
        assert native == (value == "native")
        del subject
        gc.collect()
        entry.restore()
        return seen

    native = figures("native")
    assert native == figures("python")
    assert len({stats["runs"] for stats in native}) > 1


class CoreOfBlocks:
    """An engine core as far as `InprocClient` and the pool go: steps allocate, aborts free."""

    def __init__(self, subject: Any) -> None:
        self.pool = subject
        self.taken: list[Any] = []
        self.reset_free_block_queue_order = subject.reset_free_block_queue_order

    def step_fn(self) -> tuple[None, bool]:
        self.taken = self.pool.get_new_blocks(1000)
        return None, True

    def post_step(self, model_executed: bool) -> None:
        pass

    def abort_requests(self, request_ids: list[str]) -> None:
        free(self.pool, self.taken)


def test_a_second_thread_beside_one_that_steps_and_aborts(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own queue changes block by block: a reset in between would lose some."""
    monkeypatch.setattr(logging.getLogger("vllm.plugins.pyblockpool"), "disabled", True)
    from vllm.v1.engine.core_client import InprocClient

    subject = pool(3000, True)
    client = InprocClient.__new__(InprocClient)
    client.engine_core = CoreOfBlocks(subject)
    over = threading.Event()
    answers: list[Any] = []

    def ask() -> None:
        while not over.is_set():
            try:
                answers.append(client.reset_free_block_queue_order())
            except RuntimeError as error:
                answers.append(str(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(400):
            client.get_output()
            client.abort_requests(["1"])
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert len(order(subject)) == subject.get_num_free_blocks() == 2999
    assert client.reset_free_block_queue_order() is True
    assert order(subject) == list(range(1, 3000))
    refusals = {answer for answer in answers if isinstance(answer, str)}
    assert all("in the middle of a" in refusal for refusal in refusals)
    assert len(answers) > 10


def test_a_count_that_was_assigned_from_outside_stays(queue: str) -> None:
    """vLLM's own tests set it to 0 and back."""
    subject = pool(12, True)
    scramble(subject)
    for count in (0, 3, 100):
        free_blocks = subject.free_block_queue
        free_blocks.append(free_blocks.popleft())
        free_blocks.num_free_blocks = count
        assert subject.reset_free_block_queue_order() is True
        assert free_blocks.num_free_blocks == count
        free_blocks.num_free_blocks = 11
        assert order(subject) == list(range(1, 12))


def test_a_queue_that_refuses_keeps_its_count(queue: str) -> None:
    """Somebody else's queue may raise; what was set for it is put back."""
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    class Refusing(FreeKVCacheBlockQueue):  # type: ignore[misc]
        def popleft_n(self, n: int) -> list[Any]:
            raise OSError("no more")

    subject = Refusing([KVCacheBlock(i) for i in (2, 1, 0)])
    subject.num_free_blocks = 1
    with pytest.raises(OSError, match="no more"):
        order_by_id(subject)
    assert subject.num_free_blocks == 1
    assert ids(subject.get_all_free_blocks()) == [2, 1, 0]


def test_methods_can_be_found_by_name(queue: str) -> None:
    """As pickle does it, which Ray and multiprocessing rely on."""
    from vllm import LLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient

    for method in (LLM.reset_prefix_cache, EngineCore.free_block_queue_stats):
        assert pickle.loads(pickle.dumps(method)) is method
    assert pickle.loads(pickle.dumps(InprocClient.get_output)) is InprocClient.get_output


def test_off_there_is_no_trace(queue: str) -> None:
    from vllm import LLM
    from vllm.v1.core.block_pool import BlockPool

    assert hasattr(BlockPool, "reset_free_block_queue_order")
    assert hasattr(LLM, "reset_free_block_queue_order")
    entry.restore()
    for cls in (BlockPool, LLM):
        assert not hasattr(cls, "reset_free_block_queue_order")
        assert not hasattr(cls, "free_block_queue_stats")
    with pytest.raises(TypeError, match="reorder_free_queue"):
        pool(8, True).reset_prefix_cache(reorder_free_queue=True)
