"""Ring 4: asked for? -> probe -> apply -> prove -> one log line, on a host that tests can bend."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import FakeVLLM

import pyblockpool
from pyblockpool import FreeBlockQueue, plugin
from pyblockpool.errors import (
    BlockQueueError,
    ConflictError,
    NotCompiledError,
    SettingsError,
    UnsupportedVLLMError,
)
from pyblockpool.plugin import entry, patches
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, Settings

TARGET = "vllm.v1.core.block_pool.FreeKVCacheBlockQueue"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    return FakeVLLM(monkeypatch)


VALUES = {
    "python": Settings("python"),
    "native": Settings("native"),
    "native:sorted": Settings("native", "sorted"),
    "native:extent": Settings("native", "extent"),
    "native:extent,size=1": Settings("native", "extent", 1),
    "native:extent,size=4096": Settings("native", "extent", 4096),
    "native:extent,pack_tails": Settings("native", "extent", None, True),
    "native:extent,size=4,pack_tails": Settings("native", "extent", 4, True),
}


@pytest.mark.parametrize("value", VALUES)
def test_allowed_values(value: str) -> None:
    assert Settings.from_environ({QUEUE_VARIABLE: value}) == VALUES[value]
    assert str(VALUES[value]) == value


def test_no_value() -> None:
    assert Settings.from_environ({}) == Settings(None)


@pytest.mark.parametrize(
    "value",
    [
        *["", " ", "nativ", "Native", " native", "native ", "native:", "native,", "1"],
        *["native:lru", "native:sorted,size=8", "native:extent,", "native:extent,size="],
        *["native:extent,size=3", "native:extent,size=0", "native:extent,size=8192"],
        *["native:extent,size=08", "native:extent,size=8 ", "native:extent, size=8"],
        *[
            "native:extent,size=-8",
            "native:extent,size=8,size=8",
            "python:sorted",
            "native:extent,8",
            "native:extent,pack_tails,size=4",
            "native:extent,pack_tails=1",
            "native:sorted,pack_tails",
        ],
    ],
)
def test_any_other_value_stops_start_up(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, value)
    before = host.snapshot()
    with pytest.raises(SettingsError) as caught:
        entry.register()
    for word in (f"VLLM_BLOCK_QUEUE={value!r}", "'python'", "'native'", "Unset the variable"):
        assert word in str(caught.value)
    assert host.snapshot() == before


def test_a_reason_is_told_once(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check fails where nothing of vLLM is where it is expected."""
    for name in [name for name in sys.modules if name.startswith("vllm.v1")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv(QUEUE_VARIABLE, "native:extent")
    with pytest.raises(UnsupportedVLLMError) as caught:
        entry.register()
    assert str(caught.value).count("vLLM 0.13.0 or later is needed") == 1


def test_unset_imports_nothing() -> None:
    """In a process of its own, as this one has imported everything already."""
    code = (
        "import sys; from pyblockpool.plugin.entry import register; register();"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch')"
        " or m == 'pyblockpool._queue' or m == 'pyblockpool.plugin.patches'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_unset_touches_nothing(host: FakeVLLM) -> None:
    before = host.snapshot()
    entry.register()
    assert host.snapshot() == before


def test_native(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    before = host.snapshot()
    with caplog.at_level(logging.INFO):
        entry.register()
    (line,) = caplog.messages
    for word in ("pyblockpool", "native", "policy lru", "vLLM 0.99.0", "pid "):
        assert word in line
    pool = host.block_pool.BlockPool(6, True, 16)
    assert type(pool.free_block_queue) is FreeBlockQueue
    assert pool.blocks[2].next_free_block is pool.blocks[3]
    assert host.envs.environment_variables[QUEUE_VARIABLE]() == "set"

    active = host.snapshot()
    entry.register()  # vLLM loads a plugin more than once
    assert host.snapshot() == active
    assert len(caplog.messages) == 1

    with pytest.raises(RuntimeError, match="native queues still have blocks"):
        entry.restore()
    assert host.snapshot() == active
    del pool
    entry.restore()
    assert host.snapshot() == before
    entry.restore()
    assert type(host.block_pool.BlockPool(6, True, 16).free_block_queue) is not FreeBlockQueue


def test_python_leaves_the_queue_of_vllm(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    with caplog.at_level(logging.INFO):
        entry.register()
    assert "vLLM's free-block queue" in caplog.messages[0]
    theirs = host.kv_cache_utils.FreeKVCacheBlockQueue
    assert type(host.block_pool.BlockPool(6, True, 16).free_block_queue) is theirs
    assert QUEUE_VARIABLE in host.envs.environment_variables


def test_a_variable_that_changes_later_is_refused(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()
    active = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    with pytest.raises(ConflictError, match="has changed from 'native' to 'python'"):
        entry.register()
    assert host.snapshot() == active


# What is bent, the error, and words of the sentence.
BENT: dict[str, tuple[list[tuple[str, str]], type[BlockQueueError], list[str]]] = {
    "too old": (
        [("    def evict_blocks(self, block_ids): ...\n", "")],
        UnsupportedVLLMError,
        ["no evict_blocks", "0.13.0 or later"],
    ),
    "no pool": (
        [("class BlockPool:", "class Pool:"), ("import BlockPool", "import Pool")],
        UnsupportedVLLMError,
        ["BlockPool", "0.13.0 or later"],
    ),
    "unknown method": (
        [("    def popleft(self):", "    def rotate(self): ...\n\n    def popleft(self):")],
        UnsupportedVLLMError,
        ["does not know: rotate()"],
    ),
    "unknown attribute": (
        [("self.fake_free_list_tail = None", "self.fake_free_list_tail = self.lock = None")],
        UnsupportedVLLMError,
        ["does not know: lock"],
    ),
    "missing method": (
        [("def remove(self, block):", "def _remove(self, block):")],
        UnsupportedVLLMError,
        ["lacks members", "remove"],
    ),
    "changed method": (
        [("def popleft_n(self, n):", "def popleft_n(self, n, hint=None):")],
        UnsupportedVLLMError,
        ["other arguments", "popleft_n(n, hint)"],
    ),
    "queue from a factory": (
        [
            (
                "FreeKVCacheBlockQueue(self.blocks)",
                "globals()['FreeKV' 'CacheBlockQueue'](self.blocks)",
            )
        ],
        UnsupportedVLLMError,
        ["does not construct"],
    ),
    "no links": (
        [("    prev_free_block: object = None\n", "")],
        UnsupportedVLLMError,
        ["KVCacheBlock", "prev_free_block"],
    ),
    "links of another kind": (
        [
            ("    prev_free_block: object = None\n    next_free_block: object = None\n", ""),
            (
                "    is_null: bool = False\n",
                "    is_null: bool = False\n    prev_free_block = property(lambda self: None)\n"
                "    next_free_block = property(lambda self: None)\n",
            ),
        ],
        UnsupportedVLLMError,
        ["keeps its links in an unknown way"],
    ),
    "queue replaced": (
        [
            (
                "class BlockPool:",
                "class FastQueue(FreeKVCacheBlockQueue): ...\n"
                "FastQueue.__module__ = 'rival.queue'\n"
                "FreeKVCacheBlockQueue = FastQueue\n\nclass BlockPool:",
            )
        ],
        ConflictError,
        [TARGET, "rival.queue.FastQueue", "switch that plugin off"],
    ),
    "pool replaced": (
        [
            (
                "import BlockPool\n",
                "import BlockPool as Base\nclass BlockPool(Base): ...\n",
            )
        ],
        ConflictError,
        ["kv_cache_coordinator.BlockPool", "switch that plugin off"],
    ),
    "pool replaced at home": (
        [("    def get_num_free", "    __module__ = 'rival.pool'\n    def get_num_free")],
        ConflictError,
        ["block_pool.BlockPool", "rival.pool.BlockPool"],
    ),
    "block class replaced": (
        [
            (
                "class FreeKVCacheBlockQueue:",
                "KVCacheBlock.__module__ = 'rival.blocks'\n\nclass FreeKVCacheBlockQueue:",
            )
        ],
        ConflictError,
        ["KVCacheBlock", "rival.blocks.KVCacheBlock"],
    ),
    "method of the queue replaced": (
        [
            (
                "    def remove(self, block):",
                "    remove = lambda self, block: None\n"
                "    remove.__module__ = 'rival'\n\n    def _(self, block):",
            )
        ],
        ConflictError,
        ["FreeKVCacheBlockQueue.remove", "rival"],
    ),
    "queue replaced by a factory": (
        [
            (
                "class BlockPool:",
                "from functools import partial\n"
                "FreeKVCacheBlockQueue = partial(FreeKVCacheBlockQueue)\n\nclass BlockPool:",
            )
        ],
        ConflictError,
        [TARGET, "functools.partial"],
    ),
    "constructor with another argument": (
        [("def __init__(self, blocks):", "def __init__(self, blocks, order):")],
        UnsupportedVLLMError,
        ["TypeError", "order", "made for it"],
    ),
    "pool with another argument": (
        [("enable_caching, hash_block_size):", "enable_caching, hash_block_size, device):")],
        UnsupportedVLLMError,
        ["cannot be tried out", "device", "made for it"],
    ),
    "pool with another queue after all": (
        [
            (
                "FreeKVCacheBlockQueue(self.blocks)",
                "type('Mine', (FreeKVCacheBlockQueue,), {})(self.blocks)",
            )
        ],
        UnsupportedVLLMError,
        ["has a Mine as its queue although FreeBlockQueue"],
    ),
    "pool that depends on the class of its queue": (
        [
            (
                "self.free_block_queue.append_n(blocks)",
                "q = self.free_block_queue; "
                "q.append_n(blocks if hasattr(q, '__dict__') else blocks[::-1])",
            )
        ],
        UnsupportedVLLMError,
        ["handed out", "as before"],
    ),
}


@pytest.mark.parametrize("bent", BENT)
def test_what_cannot_be_done_is_refused_in_sentences(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, bent: str
) -> None:
    edits, error, words = BENT[bent]
    host.load(*edits)
    before = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    with pytest.raises(error) as caught:
        entry.register()
    for word in words:
        assert word in str(caught.value)
    caught.value.__traceback__ = None
    gc.collect()
    assert host.snapshot() == before


def test_a_patch_that_fails_takes_the_others_back(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise OSError("no more")

    broken = patches.Patch("vllm:nothing", fail, "a test", "", "")
    all_of_them = patches.patches
    monkeypatch.setattr(patches, "patches", lambda settings: (*all_of_them(settings), broken))
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    before = host.snapshot()
    with pytest.raises(OSError, match="no more"):
        entry.register()
    assert host.snapshot() == before


def test_a_queue_that_was_replaced_after_us_is_not_overwritten(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()
    rival = type("Rival", (), {"__module__": "rival.queue"})
    host.block_pool.FreeKVCacheBlockQueue = rival
    active = host.snapshot()
    with pytest.raises(ConflictError, match=r"replaced again, by rival\.queue\.Rival"):
        entry.restore()
    assert host.snapshot() == active
    host.block_pool.FreeKVCacheBlockQueue = FreeBlockQueue
    entry.restore()


def test_what_failed_is_taken_back_although_other_queues_are_alive(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links have to stay for the queue that uses them; all else goes, and it is said."""
    host.load(*BENT["pool that depends on the class of its queue"][0])
    alive = FreeBlockQueue([host.kv_cache_utils.KVCacheBlock(0)])
    before = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    with pytest.raises(UnsupportedVLLMError, match=r"handed out.*not taken back: 1 native queues"):
        entry.register()
    assert host.snapshot() == before
    assert alive.check() == ""


@pytest.mark.parametrize("bent", ["no links", "unknown method", "queue replaced"])
def test_python_needs_less(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, bent: str) -> None:
    host.load(*BENT[bent][0])
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    monkeypatch.setitem(sys.modules, "pyblockpool._queue", None)
    entry.register()
    assert QUEUE_VARIABLE in host.envs.environment_variables


def test_a_second_copy_of_the_plugin_is_refused(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()
    active = host.snapshot()
    monkeypatch.setattr(entry, "_active", None)
    with pytest.raises(ConflictError, match="not by this copy of the plugin"):
        entry.register()
    assert host.snapshot() == active


def test_threads_switch_on_once(host: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    before = host.snapshot()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=entry.register) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    entry.restore()
    assert host.snapshot() == before


def test_a_missing_extension_stops_start_up(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyblockpool

    before = host.snapshot()
    monkeypatch.delitem(vars(pyblockpool), "FreeBlockQueue", raising=False)
    monkeypatch.setitem(sys.modules, "pyblockpool._queue", None)
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    with pytest.raises(NotCompiledError, match="install pyblockpool"):
        entry.register()
    assert host.snapshot() == before


# Block traces: VLLM_BLOCK_TRACE, beside the other variable and alone.


@pytest.mark.parametrize("value", [None, *VALUES])
def test_traces_beside_each_value(value: str | None) -> None:
    environ = {TRACE_VARIABLE: "/tmp/%p.jsonl"} | ({QUEUE_VARIABLE: value} if value else {})
    settings = Settings.from_environ(environ)
    expected = VALUES[value] if value else Settings()
    assert settings == replace(expected, trace="/tmp/%p.jsonl")
    assert settings.variables() == environ
    assert expected.variables() == ({QUEUE_VARIABLE: value} if value else {})


@pytest.mark.parametrize("queue", [None, "native"])
def test_a_trace_without_a_name_stops_start_up(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, queue: str | None
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "")
    if queue:
        monkeypatch.setenv(QUEUE_VARIABLE, queue)
    before = host.snapshot()
    with pytest.raises(SettingsError, match=r"VLLM_BLOCK_TRACE is empty: give it the name of the"):
        entry.register()
    assert host.snapshot() == before


def test_a_trace_alone(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another vLLM queue, too, and without our compiled one."""
    host.load(*BENT["queue replaced"][0])
    monkeypatch.setitem(sys.modules, "pyblockpool._queue", None)
    monkeypatch.setenv(TRACE_VARIABLE, "/tmp/%p.jsonl")
    before = host.snapshot()
    with caplog.at_level(logging.INFO):
        entry.register()
    (line,) = caplog.messages
    # Every process says so, of which few have an engine core, and the file is not looked at yet.
    assert "queue untouched, engine cores are asked to record block tables in /tmp/%p" in line
    changed = {name for name, value in host.snapshot().items() if before.get(name) != value}
    assert changed == {
        "variables",
        "KVCacheManager.__init__",
        "KVCacheManager.free",
        "KVCacheManager.get_computed_blocks",
        "KVCacheManager.reset_prefix_cache",
        "Scheduler.__init__",
        "Scheduler.update_from_output",
        "EngineCore.shutdown",
    }
    assert list(host.envs.environment_variables) == [TRACE_VARIABLE]
    entry.register()
    assert len(caplog.messages) == 1
    entry.restore()
    assert host.snapshot() == before


@pytest.mark.parametrize("value", VALUES)
def test_without_a_trace_nothing_of_it_is_there(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    for package, name in ((plugin, "recorder"), (pyblockpool, "trace_writer")):
        monkeypatch.delattr(package, name, raising=False)
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
    monkeypatch.setenv(QUEUE_VARIABLE, value)
    before = host.snapshot()
    entry.register()
    assert host.snapshot()["KVCacheManager.free"] is before["KVCacheManager.free"]
    assert not {"pyblockpool.plugin.recorder", "pyblockpool.trace_writer"} & set(sys.modules)


@pytest.mark.parametrize("value", VALUES)
def test_a_trace_beside_a_queue(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Two patches may meet in a method: both are taken back."""
    before = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, value)
    monkeypatch.setenv(TRACE_VARIABLE, "/tmp/%p.jsonl")
    entry.register()
    assert set(host.envs.environment_variables) == {QUEUE_VARIABLE, TRACE_VARIABLE}
    entry.restore()
    assert host.snapshot() == before


def test_a_trace_that_changes_later_is_refused(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    entry.register()
    monkeypatch.setenv(TRACE_VARIABLE, "/tmp/late")
    with pytest.raises(ConflictError, match=r"VLLM_BLOCK_TRACE has changed from None to '/tmp/la"):
        entry.register()


def test_a_search_of_the_prefix_cache_may_have_a_bound(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 has it."""
    host.load(
        (
            "def get_computed_blocks(self, request):\n        return [], 0",
            "def get_computed_blocks(self, request, max_cache_hit_length=None):\n"
            "        return [], max_cache_hit_length",
        )
    )
    monkeypatch.setenv(TRACE_VARIABLE, "/tmp/%p.jsonl")
    entry.register()
    manager = host.make("KVCacheManager", SimpleNamespace(num_blocks=8))
    assert manager.get_computed_blocks("request", 32) == ([], 32)
    assert manager.get_computed_blocks("request", max_cache_hit_length=16) == ([], 16)


UNTRACEABLE: dict[str, tuple[list[tuple[str, str]], type[BlockQueueError], list[str]]] = {
    "renamed": (
        [("    def free(self, request): ...", "    def release(self, request): ...")],
        UnsupportedVLLMError,
        ["lacks members that the block trace needs: KVCacheManager.free()", "unset VLLM_BLOCK_TR"],
    ),
    "other arguments": (
        [("def get_computed_blocks(self, request):", "def get_computed_blocks(self, request, n):")],
        UnsupportedVLLMError,
        ["other arguments", "KVCacheManager.get_computed_blocks(request, n)"],
    ),
    "other constructor": (
        [("def __init__(self, vllm_config):", "def __init__(self, config, vllm_config=9):")],
        UnsupportedVLLMError,
        ["has changed what the block trace is made of (Scheduler.__init__())"],
    ),
    "other requests": (
        [("    num_output_tokens = 0\n", "    x = 0\n"), ("WAITING_FOR_REMOTE_KVS", "LOADING")],
        UnsupportedVLLMError,
        ["(Request.num_output_tokens, RequestStatus.WAITING_FOR_REMOTE_KVS)", "VLLM_BLOCK_TRACE"],
    ),
    "replaced": (
        [
            (
                "    def free(self, request): ...",
                "    free = lambda self: None\n    free.__module__ = 'rival.trace'",
            )
        ],
        ConflictError,
        ["KVCacheManager.free has been replaced by rival.trace", "unset VLLM_BLOCK_TRACE"],
    ),
    "no engine core": (
        [("class EngineCore:", "class Engine:")],
        UnsupportedVLLMError,
        ["EngineCore"],
    ),
}


@pytest.mark.parametrize("queue", [None, "native"])
@pytest.mark.parametrize("bent", UNTRACEABLE)
def test_what_cannot_be_recorded_is_refused_in_sentences(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, bent: str, queue: str | None
) -> None:
    edits, error, words = UNTRACEABLE[bent]
    host.load(*edits)
    before = host.snapshot()
    monkeypatch.setenv(TRACE_VARIABLE, "/tmp/%p.jsonl")
    if queue:
        monkeypatch.setenv(QUEUE_VARIABLE, queue)
    with pytest.raises(error) as caught:
        entry.register()
    for word in ["VLLM_BLOCK_TRACE=/tmp/%p.jsonl", *words]:
        assert word in str(caught.value)
    assert host.snapshot() == before


def test_what_was_asked_for_is_told_as_a_shell_takes_it(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error that names both variables: with quotes where a name has blanks, else without."""
    host.load(*UNTRACEABLE["renamed"][0])
    monkeypatch.setenv(QUEUE_VARIABLE, "native:extent,size=4")
    monkeypatch.setenv(TRACE_VARIABLE, "/tmp/$my trace.jsonl")
    with pytest.raises(UnsupportedVLLMError) as caught:
        entry.register()
    asked, said, _ = str(caught.value).partition(" cannot be done here: ")
    assert said
    assert asked == "VLLM_BLOCK_QUEUE=native:extent,size=4 VLLM_BLOCK_TRACE='/tmp/$my trace.jsonl'"


@pytest.mark.parametrize("trace", [None, "/tmp/%p.jsonl"])
@pytest.mark.parametrize("value", [None, *VALUES])
def test_each_patch_says_why_and_until_when(
    host: FakeVLLM, value: str | None, trace: str | None
) -> None:
    settings = replace(VALUES[value] if value else Settings(), trace=trace)
    assert bool(patches.patches(settings)) == bool(value or trace)
    for patch in patches.patches(settings):
        assert patch.target.startswith("vllm.")
        assert patch.upstream.startswith("https://github.com/vllm-project/vllm/")
        assert min(len(patch.why), len(patch.retire_when)) > 20
