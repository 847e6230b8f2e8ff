"""The placement policies in vLLM: the size of extents, the hint, and the end of all hashes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import FakeVLLM, config
from implementations import HAS_VLLM, ids
from pools import free, give_hash, order, pool, splits_by_hash

from pyblockpool import FreeBlockQueue
from pyblockpool.errors import ConflictError, UnsupportedVLLMError
from pyblockpool.plugin import entry, surface
from pyblockpool.settings import QUEUE_VARIABLE

POLICIES = ["native:sorted", "native:extent", "native:extent,size=2,pack_tails"]
Activate = Callable[[str], None]

needs_vllm = pytest.mark.skipif(
    not HAS_VLLM or not splits_by_hash(), reason="placement needs vLLM 0.24.0 or later"
)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    return FakeVLLM(monkeypatch)


@pytest.fixture
def activate(monkeypatch: pytest.MonkeyPatch) -> Activate:
    def activate(value: str) -> None:
        monkeypatch.setenv(QUEUE_VARIABLE, value)
        entry.register()

    return activate


def cache_pool(host: FakeVLLM, num_blocks: int, *block_sizes: int) -> Any:
    """The pool of a KVCacheManager, with blocks of 16 tokens if nothing else is said."""
    manager = host.make("KVCacheManager", config(num_blocks, *(block_sizes or (16,))))
    return manager.coordinator.block_pool


@pytest.mark.parametrize("value", POLICIES)
def test_on_and_off(
    host: FakeVLLM, activate: Activate, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = host.snapshot()
    with caplog.at_level(logging.INFO):
        activate(value)
    (line,) = caplog.messages
    assert f"policy {value.removeprefix('native:').partition(',')[0]}" in line
    assert ("extents of" in line) == ("extent" in value)
    assert ("tails packed" in line) == ("pack_tails" in value)
    subject = cache_pool(host, 12)
    assert type(subject.free_block_queue) is FreeBlockQueue
    stats = subject.free_block_queue_stats()
    assert stats["policy"] in value
    assert stats["size"] == {"native:sorted": 1, "native:extent": 8}.get(value, 2)
    assert stats["pack_tails"] is ("pack_tails" in value)
    active = host.snapshot()
    entry.register()
    assert host.snapshot() == active
    del subject
    gc.collect()
    entry.restore()
    assert host.snapshot() == before


@pytest.mark.parametrize(
    ("block_sizes", "size"),
    [
        ([16], 8),
        ([32], 4),
        ([128], 1),
        ([1056], 1),
        ([48], 2),
        ([1], 128),
        ([64, 16, 32], 8),
    ],
)
def test_an_extent_is_128_tokens(
    host: FakeVLLM, activate: Activate, block_sizes: list[int], size: int
) -> None:
    """Of the block size that the engine has resolved; of the smallest of several."""
    activate("native:extent")
    assert cache_pool(host, 300, *block_sizes).free_block_queue.stats()["size"] == size


def test_a_size_that_was_asked_for_counts(host: FakeVLLM, activate: Activate) -> None:
    activate("native:extent,size=64")
    assert cache_pool(host, 300, 16).free_block_queue.stats()["size"] == 64


@pytest.mark.parametrize("value", ["native:extent", "native:extent,size=64"])
def test_a_pool_that_no_kernel_reads_has_no_extents(
    host: FakeVLLM, activate: Activate, value: str
) -> None:
    """Of an offload connector, say: built by a coordinator of its own, or by itself."""
    activate(value)
    for subject in (
        host.make("KVCacheCoordinator", config(300, 16)).block_pool,
        host.make("BlockPool", 300, True, 16),
    ):
        assert subject.free_block_queue.stats()["size"] == 1


def test_a_manager_that_fails_leaves_no_size_behind(host: FakeVLLM, activate: Activate) -> None:
    activate("native:extent")
    without_blocks = config(0, 16)
    without_blocks.num_blocks = None
    with pytest.raises(TypeError):
        host.make("KVCacheManager", without_blocks)
    assert host.make("BlockPool", 12, True, 16).free_block_queue.stats()["size"] == 1


@pytest.mark.parametrize("cls", ["SingleTypeKVCacheManager", "SlidingWindowManager"])
def test_requests_grow_in_place(host: FakeVLLM, activate: Activate, cls: str) -> None:
    activate("native:extent")
    subject = cache_pool(host, 64)
    manager = host.make(cls, subject)
    one, other = (manager.allocate_new_blocks(name, 3, 3) for name in "ab")
    assert (ids(one), ids(other)) == ([8, 9, 10], [16, 17, 18])
    manager.allocate_new_blocks("a", 4, 4)
    manager.allocate_external_computed_blocks("b", 3, 2)
    manager.allocate_new_blocks("a", 5, 5)
    assert ids(manager.req_to_blocks["a"]) == [8, 9, 10, 11, 12]
    assert ids(manager.req_to_blocks["b"]) == [16, 17, 18, 19, 20]
    # Whoever allocates without a request gets none of their places.
    assert ids(subject.get_new_blocks(1)) == [1]


def test_where_there_is_no_hint(host: FakeVLLM, activate: Activate) -> None:
    """Behind the null block, a block of another pool, or one that is given up."""
    activate("native:extent")
    subject, other = (cache_pool(host, 64) for _ in range(2))
    manager = host.make("SingleTypeKVCacheManager", subject)
    manager.allocate_new_blocks("a", 2, 2)
    for last in (
        subject.null_block,
        other.get_new_blocks(1)[0],
        SimpleNamespace(is_null=False, ref_cnt=1, block_id=9999),
        subject.blocks[20],
    ):
        last.is_null = last is subject.null_block
        last.ref_cnt = int(last is not subject.blocks[20])
        manager.req_to_blocks["x"] = [last]
        (block,) = manager.allocate_new_blocks("x", 2, 2)
        assert block.block_id in range(1, 8), "a place that single blocks share"
    assert subject.free_block_queue.check() == ""


def test_a_pool_with_another_queue_is_left_alone(host: FakeVLLM, activate: Activate) -> None:
    activate("native:extent")
    theirs = host.kv_cache_utils.FreeKVCacheBlockQueue
    subject = cache_pool(host, 12)
    subject.free_block_queue = theirs([host.kv_cache_utils.KVCacheBlock(i) for i in range(6)])
    manager = host.make("SingleTypeKVCacheManager", subject)
    assert len(manager.allocate_new_blocks("a", 2, 2)) == 2
    assert len(manager.allocate_new_blocks("a", 4, 4)) == 2


def test_no_hint_while_the_last_block_has_room(host: FakeVLLM, activate: Activate) -> None:
    """vLLM asks for each running request in each step: a hint each time would cost its steps."""
    activate("native:extent")
    manager = host.make("SingleTypeKVCacheManager", cache_pool(host, 64))
    manager.block_size = 4
    hints: list[Any] = []

    class Watched(FreeBlockQueue):
        def grow_after(self, block: Any) -> None:
            hints.append(block)
            super().grow_after(block)

    subject = cache_pool(host, 64)
    subject.free_block_queue = Watched(subject.blocks[1:], policy="extent", size=8)
    manager = host.make("SingleTypeKVCacheManager", subject)
    manager.block_size = 4
    (block,) = manager.allocate_new_blocks("a", 1, 1)
    for num_tokens in (2, 3, 4):
        assert manager.allocate_new_blocks("a", num_tokens, num_tokens) == []
    assert hints == []
    (following,) = manager.allocate_new_blocks("a", 5, 5)
    assert hints == [block, None]
    assert following.block_id == block.block_id + 1


def test_a_manager_that_takes_other_arguments_grows_in_place(
    host: FakeVLLM, activate: Activate
) -> None:
    """Of a plugin for other hardware, say."""
    host.load(
        (
            "def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):\n"
            "        return super()",
            "def allocate_new_blocks(self, request_id, num_tokens):\n"
            "        num_tokens_main_model = num_tokens\n"
            "        return super()",
        )
    )
    activate("native:extent")
    manager = host.make("SlidingWindowManager", cache_pool(host, 64))
    for number in (2, 3, 4):
        manager.allocate_new_blocks("a", number)
        manager.allocate_new_blocks("b", number)
    assert [ids(manager.req_to_blocks[name]) for name in "ab"] == [[8, 9, 10, 11], [16, 17, 18, 19]]


def test_an_allocation_that_fails_takes_its_hint_back(host: FakeVLLM, activate: Activate) -> None:
    activate("native:extent")
    subject = cache_pool(host, 24)
    manager = host.make("SingleTypeKVCacheManager", subject)
    manager.allocate_new_blocks("a", 2, 2)
    with pytest.raises(AssertionError):
        manager.allocate_new_blocks("a", 100, 100)
    assert ids(subject.get_new_blocks(1)) == [1]


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (
            ("self.free_block_queue.prepend_n([])", "pass"),
            UnsupportedVLLMError,
            ["does not tell blocks with a hash", "0.24.0 or later"],
        ),
        (  # as vLLM 0.23 has it
            ("(self, ordered_blocks):", "(self, ordered_blocks, prepend=False):"),
            UnsupportedVLLMError,
            ["does not tell blocks with a hash", "0.24.0 or later"],
        ),
        (
            (
                "def allocate_new_blocks(self, request_id, num",
                "def allocate_new_blocks(self, r, num",
            ),
            UnsupportedVLLMError,
            ["in an unknown way", "SlidingWindowManager.allocate_new_blocks()"],
        ),
        (
            ("self.block_size = 1", "pass"),
            UnsupportedVLLMError,
            ["in an unknown way", "SingleTypeKVCacheManager.block_size"],
        ),
        (
            (
                "kv_cache_config):\n        self.coordinator = KVCacheCoordinator(kv_cache_config)",
                "config):\n        self.coordinator = KVCacheCoordinator(config)",
            ),
            UnsupportedVLLMError,
            ["in an unknown way", "KVCacheManager.__init__()"],
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(
    host: FakeVLLM,
    activate: Activate,
    edit: tuple[str, str],
    error: type[Exception],
    words: list[str],
) -> None:
    host.load(edit)
    before = host.snapshot()
    with pytest.raises(error) as caught:
        activate("native:extent")
    for word in words:
        assert word in str(caught.value)
    caught.value.__traceback__ = None
    gc.collect()
    assert host.snapshot() == before


def test_a_wrapper_that_was_replaced_after_us_is_not_overwritten(
    host: FakeVLLM, activate: Activate
) -> None:
    activate("native:extent")
    base = vars(host.modules[surface.MANAGERS])["SingleTypeKVCacheManager"]
    ours = base.allocate_new_blocks
    base.allocate_new_blocks = lambda self, request_id: None
    active = host.snapshot()
    with pytest.raises(ConflictError, match=r"allocate_new_blocks has been replaced again"):
        entry.restore()
    assert host.snapshot() == active
    base.allocate_new_blocks = ours


@needs_vllm
@pytest.mark.parametrize("value", POLICIES)
def test_each_round_starts_in_canonical_order(activate: Activate, value: str) -> None:
    """After a reset of the prefix cache, with no call by the user."""
    activate(value)
    subject = pool(41, True)
    tables = []
    for number in range(3):
        requests = [subject.get_new_blocks(n) for n in (8, 3, 16, 5)]
        tables.append([ids(request) for request in requests])
        for request in (requests[2], requests[0], requests[3], requests[1]):
            for block in request:
                give_hash(subject, block, 1000 * number + block.block_id)
            free(subject, request)
        assert subject.reset_prefix_cache() is True
    assert tables[0] == tables[1] == tables[2]
    assert subject.free_block_queue.check() == ""


@needs_vllm
@pytest.mark.parametrize("value", POLICIES)
def test_a_refused_reset_keeps_the_classes(activate: Activate, value: str) -> None:
    activate(value)
    subject = pool(41, True)
    held, chain = subject.get_new_blocks(1), subject.get_new_blocks(16)
    for block in chain:
        give_hash(subject, block)
    free(subject, chain)
    before = subject.free_block_queue.stats()
    assert subject.reset_prefix_cache() is False
    assert subject.free_block_queue.stats() == before
    assert subject.reset_free_block_queue_order() is False
    free(subject, held)
    assert subject.reset_free_block_queue_order() is True
    assert subject.free_block_queue.stats()["aged"] == 0
    assert sorted(order(subject)) == list(range(1, 41))


@needs_vllm
def test_every_manager_of_vllm_has_the_hint(activate: Activate) -> None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    before = {
        (cls, name): vars(cls)[name]
        for cls, name in surface.allocators(managers.SingleTypeKVCacheManager)
    }
    # Not by way of the base, as the plugin finds them.
    allocating = {
        cls
        for cls in vars(managers).values()
        if isinstance(cls, type) and set(surface.ALLOCATE) & vars(cls).keys()
    }
    assert {cls for cls, _ in before} >= allocating
    # Three before vLLM 0.30.
    assert len(allocating) > (3 if hasattr(managers, "CircularBufferManager") else 2)
    activate("native:extent")
    for (cls, name), original in before.items():
        assert vars(cls)[name].__wrapped__ is original
    gc.collect()
    entry.restore()
    for (cls, name), original in before.items():
        assert vars(cls)[name] is original
