"""The order reset from every front end down to the pool, on a host that tests can bend."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import FakeVLLM, config

from pyblockpool.errors import ConflictError, InactiveError, UnsupportedVLLMError
from pyblockpool.plugin import clients, entry, surface
from pyblockpool.plugin.reset import DOCS, LAYERS
from pyblockpool.settings import QUEUE_VARIABLE


@pytest.fixture(params=["python", "native"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    host = FakeVLLM(monkeypatch)
    monkeypatch.setenv(QUEUE_VARIABLE, request.param)
    entry.register()
    return host


def core(host: FakeVLLM, num_gpu_blocks: int = 6) -> Any:
    """An engine core with a shuffled pool."""
    made = host.make("EngineCore", host.make("Scheduler", num_gpu_blocks))
    queue = pool_of(made).free_block_queue
    queue.append_n(queue.popleft_n(num_gpu_blocks - 1)[::-1])
    return made


def pool_of(core: Any) -> Any:
    return core.scheduler.kv_cache_manager.coordinator.block_pool


def order(core: Any) -> list[int]:
    return [b.block_id for b in pool_of(core).free_block_queue.get_all_free_blocks()]


def hold(core: Any) -> Any:
    """As a request holds a block."""
    (block,) = pool_of(core).get_new_blocks(1)
    block.ref_cnt = 1
    return block


CORE_RESET = """
    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
"""


class OldCore:
    """An engine core in which pyblockpool is not active."""

    def __init__(self) -> None:
        self.resets: list[tuple[bool, bool]] = []

    def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
        self.resets.append((running, connector))
        return True


OldCore.__name__ = "EngineCoreProc"  # as it is called in AttributeErrors


def llm(host: FakeVLLM, client: Any) -> Any:
    return host.make("LLM", host.make("LLMEngine", client))


@pytest.fixture(params=["InprocClient", "SyncMPClient"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_from_llm_to_the_pool(host: FakeVLLM, client: str) -> None:
    engine_core = core(host)
    subject = llm(host, host.make(client, engine_core))
    assert order(engine_core) == [5, 4, 3, 2, 1]
    assert subject.reset_free_block_queue_order() is True
    assert order(engine_core) == [1, 2, 3, 4, 5]


def test_the_truth_comes_back(host: FakeVLLM, client: str) -> None:
    engine_core = core(host)
    subject = llm(host, host.make(client, engine_core))
    block = hold(engine_core)
    before = order(engine_core)
    assert subject.reset_free_block_queue_order() is False
    assert subject.reset_prefix_cache(reorder_free_queue=True) is False
    assert order(engine_core) == before
    block.ref_cnt = 0
    pool_of(engine_core).free_blocks([block])
    assert subject.reset_prefix_cache(True, True, True) is True
    assert order(engine_core) == [1, 2, 3, 4, 5]
    assert engine_core.scheduler.resets == [(False, False), (True, True)]


def test_stats_come_from_the_engine_core(host: FakeVLLM, client: str) -> None:
    subject = llm(host, host.make(client, core(host)))
    stats = subject.free_block_queue_stats()
    assert stats.keys() == {
        "pid",
        "implementation",
        "policy",
        "num_blocks",
        "in_use",
        "free",
        "unhashed",
        "runs",
        "longest_run",
        "other_pools",
    }
    assert (stats["num_blocks"], stats["free"], stats["runs"]) == (6, 5, 5)


def test_from_async_llm_over_all_engines(host: FakeVLLM) -> None:
    """vllm-omni#6739: one of two data-parallel engines is busy."""
    idle, busy = core(host), core(host, 9)
    block = hold(busy)
    client = host.make("AsyncMPClient", idle, busy)
    subject = host.make("AsyncLLM", client)

    async def play() -> None:
        before = order(busy)
        assert await subject.reset_free_block_queue_order() is False
        assert order(busy) == before
        assert await subject.reset_prefix_cache(reorder_free_queue=True) is False
        block.ref_cnt = 0
        pool_of(busy).free_blocks([block])
        assert await subject.reset_free_block_queue_order() is True
        assert order(idle) == [1, 2, 3, 4, 5]
        assert order(busy) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert await subject.reset_prefix_cache(reorder_free_queue=True) is True
        stats = await subject.free_block_queue_stats()
        assert [each["num_blocks"] for each in stats] == [6, 9]

    asyncio.run(play())


def test_one_engine_gives_one_dict(host: FakeVLLM) -> None:
    subject = host.make("AsyncLLM", host.make("AsyncMPClient", core(host)))
    stats = asyncio.run(subject.free_block_queue_stats())
    assert stats["num_blocks"] == 6
    assert inspect.iscoroutinefunction(type(subject).reset_free_block_queue_order)


CALLS: list[tuple[tuple[bool, ...], dict[str, bool]]] = [
    ((), {}),
    ((True,), {}),
    ((False, True), {}),
    ((), {"reset_connector": True}),
    ((), {"reset_running_requests": True, "reset_connector": False}),
    ((), {"reorder_free_queue": False}),
]


@pytest.mark.parametrize(("arguments", "keywords"), CALLS)
def test_calls_without_the_new_argument_are_those_of_before(
    host: FakeVLLM, arguments: tuple[bool, ...], keywords: dict[str, bool]
) -> None:
    """And an engine core without the plugin understands them."""
    old = OldCore()
    client = host.make("SyncMPClient", old)
    assert llm(host, client).reset_prefix_cache(*arguments, **keywords) is True
    async_client = host.make("AsyncMPClient", old)
    subject = host.make("AsyncLLM", async_client)
    assert asyncio.run(subject.reset_prefix_cache(*arguments, **keywords)) is True
    (sent,) = client.sent
    assert async_client.sent == [sent]
    assert len(sent) == 3, "method and two arguments, as vLLM sends it"
    expected = dict(zip(("reset_running_requests", "reset_connector"), arguments, strict=False))
    expected |= keywords
    assert (
        old.resets
        == [(expected.get("reset_running_requests", False), expected.get("reset_connector", False))]
        * 2
    )


def test_the_signature_is_true_at_every_layer(host: FakeVLLM) -> None:
    """vLLM's utility calls count the parameters, and its own callers pass keywords."""
    seen = 0
    for layer in LAYERS:
        cls = vars(host.modules[layer.module])[layer.cls]
        for name in layer.wraps:
            if not name.startswith("reset_prefix_cache"):
                continue
            parameters = list(inspect.signature(vars(cls)[name]).parameters)
            of_pools = ["self", "reorder_free_queue"]
            assert parameters in (
                of_pools,
                ["self", "reset_running_requests", "reset_connector", *of_pools[1:]],
            )
            seen += 1
        for name in layer.adds:
            method = vars(cls)[name]
            assert list(inspect.signature(method).parameters) == ["self"]
            assert (method.__name__, method.__qualname__) == (name, f"{layer.cls}.{name}")
            assert method.__doc__ == DOCS[name.removesuffix("_async")]
    assert seen == 11


def test_the_documentation_of_vllm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeVLLM(monkeypatch)
    before = '    """What vLLM says.\n\n    More.\n    """\n'
    host.load((CORE_RESET, CORE_RESET.replace("):\n", "):\n    " + before)))
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    entry.register()
    doc = inspect.getdoc(vars(host.modules[surface.CORE])["EngineCore"].reset_prefix_cache)
    assert doc is not None
    assert doc.startswith("What vLLM says.\n\nMore.\n\npyblockpool adds ``reorder_free_queue``")


@pytest.mark.parametrize("call", ["order", "cache", "stats"])
def test_an_engine_core_without_the_plugin(host: FakeVLLM, call: str) -> None:
    """The front end has the variable, the engine core has not: it is named."""
    arguments = {"reorder_free_queue": True} if call == "cache" else {}
    method = {
        "order": "reset_free_block_queue_order",
        "cache": "reset_prefix_cache",
        "stats": "free_block_queue_stats",
    }[call]
    old = OldCore()
    with pytest.raises(
        InactiveError, match=rf"set {QUEUE_VARIABLE} to native .* in which the engine starts"
    ):
        getattr(llm(host, host.make("SyncMPClient", old)), method)(**arguments)
    subject = host.make("AsyncLLM", host.make("AsyncMPClient", core(host), old))
    with pytest.raises(InactiveError, match=QUEUE_VARIABLE):
        asyncio.run(getattr(subject, method)(**arguments))
    assert old.resets == []


@pytest.mark.parametrize("stats_fail", [False, True])
def test_other_errors_of_the_engine_core_pass(host: FakeVLLM, stats_fail: bool) -> None:
    """As they are, whatever they look like."""

    class Broken(OldCore):
        def reset_free_block_queue_order(self) -> bool:
            raise OSError("'Coordinator' object has no attribute 'reset_free_block_queue_order'")

        def reset_prefix_cache(self, a: bool = False, b: bool = False, c: bool = False) -> bool:
            raise AssertionError

        def free_block_queue_stats(self) -> dict[str, Any]:
            if stats_fail:
                raise OSError("no figures")
            return {}

    def check(error: BaseException) -> None:
        assert type(error) is Exception
        assert error.__cause__ is None

    client = host.make("SyncMPClient", Broken())
    async_client = host.make("AsyncMPClient", Broken(), core(host))
    with pytest.raises(Exception, match="'Coordinator' object has no") as caught:
        llm(host, client).reset_free_block_queue_order()
    check(caught.value)
    with pytest.raises(Exception, match=r"Call to reset_prefix_cache method failed: $") as caught:
        llm(host, client).reset_prefix_cache(reorder_free_queue=True)
    check(caught.value)
    subject = host.make("AsyncLLM", async_client)
    with pytest.raises(Exception, match="'Coordinator' object has no") as caught:
        asyncio.run(subject.reset_free_block_queue_order())
    check(caught.value)
    with pytest.raises(Exception, match=r"Call to reset_prefix_cache method failed: $") as caught:
        asyncio.run(subject.reset_prefix_cache(reorder_free_queue=True))
    check(caught.value)


def test_an_engine_that_fails_is_not_kept_back_by_one_that_is_silent(host: FakeVLLM) -> None:
    client = host.make("AsyncMPClient", "silent", "broken")

    async def call(method: str, *arguments: bool, engine: str) -> bool:
        if engine == "silent":
            await asyncio.Event().wait()
        raise OSError("no more")

    client._call_utility_async = call
    subject = host.make("AsyncLLM", client)
    with pytest.raises(OSError, match="no more"):
        asyncio.run(asyncio.wait_for(subject.reset_free_block_queue_order(), 30))


def test_somebody_elses_schedulers(host: FakeVLLM) -> None:
    scheduler_class = vars(host.modules[surface.SCHEDULER])["Scheduler"]
    interface = vars(host.modules[surface.SCHEDULER_INTERFACE])["SchedulerInterface"]

    class Derived(scheduler_class):  # type: ignore[misc,valid-type]
        """Knows nothing of the new argument."""

        def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
            return bool(super().reset_prefix_cache(running, connector))

    class Unrelated:
        def __init__(self) -> None:
            self.kv_cache_manager = host.make("KVCacheManager", config(6))

        def reset_prefix_cache(self, *arguments: bool) -> bool:
            return True

    class WithoutManager(interface):  # type: ignore[misc,valid-type]
        def reset_prefix_cache(self, *arguments: bool) -> bool:
            return True

    class OfItsOwn(Unrelated):
        def reset_free_block_queue_order(self) -> bool:
            return False

    for scheduler in (Derived(6), Unrelated()):
        engine_core = host.make("EngineCore", scheduler)
        queue = pool_of(engine_core).free_block_queue
        queue.append(queue.popleft())
        subject = llm(host, host.make("SyncMPClient", engine_core))
        assert subject.reset_prefix_cache(reorder_free_queue=True) is True
        assert order(engine_core) == [1, 2, 3, 4, 5]
        assert subject.free_block_queue_stats()["free"] == 5
    subject = llm(host, host.make("InprocClient", host.make("EngineCore", WithoutManager())))
    assert subject.reset_prefix_cache() is True
    with pytest.raises(NotImplementedError, match=r"WithoutManager has no KVCacheManager of vLLM"):
        subject.reset_free_block_queue_order()
    subject = llm(host, host.make("InprocClient", host.make("EngineCore", OfItsOwn())))
    assert subject.reset_free_block_queue_order() is False


def test_a_client_that_is_not_known(host: FakeVLLM) -> None:
    base = vars(host.modules[surface.CORE_CLIENT])["EngineCoreClient"]

    class Remote(base):  # type: ignore[misc,valid-type]
        pass

    with pytest.raises(NotImplementedError, match=r"client .*Remote does not pass this call on"):
        llm(host, Remote()).reset_free_block_queue_order()
    with pytest.raises(NotImplementedError, match=r"client .*Remote does not pass this call on"):
        asyncio.run(host.make("AsyncLLM", Remote()).free_block_queue_stats())


def test_a_client_that_does_not_know_the_argument(host: FakeVLLM) -> None:
    sync_class, async_class = (
        vars(host.modules[surface.CORE_CLIENT])[name] for name in ("SyncMPClient", "AsyncMPClient")
    )

    class Sync(sync_class):  # type: ignore[misc,valid-type]
        def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
            return True

    class Async(async_class):  # type: ignore[misc,valid-type]
        async def reset_prefix_cache_async(self, running: bool = False, b: bool = False) -> bool:
            return True

    subject = llm(host, Sync(core(host)))
    assert subject.reset_prefix_cache() is True
    with pytest.raises(NotImplementedError, match=r"Sync\.reset_prefix_cache\(\) is not vLLM's"):
        subject.reset_prefix_cache(reorder_free_queue=True)
    assert subject.reset_free_block_queue_order() is True
    subject = host.make("AsyncLLM", Async(core(host)))
    with pytest.raises(NotImplementedError, match=r"Async\.reset_prefix_cache_async\(\) is not"):
        asyncio.run(subject.reset_prefix_cache(reorder_free_queue=True))


def test_an_engine_core_that_dies_in_the_middle_of_a_call(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own calls wait for ever then."""
    monkeypatch.setattr(clients, "HEARTBEAT", 0.01)
    dead = vars(host.modules["vllm.v1.engine.exceptions"])["EngineDeadError"]
    over = threading.Event()

    class Silent(OldCore):
        def reset_free_block_queue_order(self) -> bool:
            caller.resources.engine_dead = True
            return over.wait(30)

    caller = host.make("SyncMPClient", Silent())
    try:
        with pytest.raises(dead, match="its engine core has died"):
            llm(host, caller).reset_free_block_queue_order()
    finally:
        over.set()
    client = host.make("AsyncMPClient", "silent")

    async def call(method: str, *arguments: bool, engine: str) -> bool:
        client.resources.engine_dead = True
        return await asyncio.Event().wait()

    client._call_utility_async = call
    with pytest.raises(dead, match="its engine core has died"):
        asyncio.run(host.make("AsyncLLM", client).free_block_queue_stats())


def test_a_caller_that_is_cancelled_leaves_no_call_behind(host: FakeVLLM) -> None:
    client = host.make("AsyncMPClient", "silent", "silent")
    ended: list[str] = []

    async def call(method: str, *arguments: bool, engine: str) -> bool:
        try:
            return await asyncio.Event().wait()
        finally:
            ended.append(engine)

    client._call_utility_async = call

    async def play() -> None:
        subject = host.make("AsyncLLM", client)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(subject.reset_free_block_queue_order(), 0.05)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())
    assert ended == ["silent", "silent"]


@pytest.mark.parametrize("nested", [False, True], ids=["connector", "MultiConnector"])
def test_the_cursor_of_a_lazy_offload_is_dropped(host: FakeVLLM, nested: bool) -> None:
    engine_core = core(host)
    manager = SimpleNamespace(_cursor="a block")
    lazy, other = SimpleNamespace(scheduler_manager=manager), SimpleNamespace()
    engine_core.scheduler.connector = SimpleNamespace(_connectors=[other, lazy]) if nested else lazy
    block = hold(engine_core)
    assert engine_core.reset_free_block_queue_order() is False
    assert manager._cursor == "a block"
    block.ref_cnt = 0
    pool_of(engine_core).free_blocks([block])
    assert engine_core.reset_free_block_queue_order() is True
    assert manager._cursor is None
    assert vars(other) == {}


class Step:
    """Something that an engine is in the middle of, in a thread of its own, until `end()`."""

    def __init__(self, client: Any, run: Callable[[], Any]) -> None:
        self._inside, self._go_on = threading.Event(), threading.Event()
        self.outputs: list[Any] = []
        client.step = client.engine_core.scheduler.step = self._step
        self._thread = threading.Thread(target=lambda: self.outputs.append(run()))
        self._thread.start()
        assert self._inside.wait(30)

    def _step(self) -> str:
        self._inside.set()
        assert self._go_on.wait(30)
        return "output"

    def end(self) -> None:
        self._go_on.set()
        self._thread.join()


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("get_output", (), "a step"),
        ("abort_requests", (["1"],), r"abort_requests\(\)"),
        ("sleep", (1,), r"sleep\(\)"),
        ("release_kv_cache_memory", (), r"release_kv_cache_memory\(\)"),
        ("reset_prefix_cache", (True,), r"reset_prefix_cache\(\)"),
    ],
)
def test_while_the_engine_changes_its_blocks_in_another_thread(
    host: FakeVLLM, name: str, arguments: tuple[Any, ...], what: str
) -> None:
    engine_core = core(host)
    client = host.make("InprocClient", engine_core)
    subject = llm(host, client)
    step = Step(client, lambda: getattr(client, name)(*arguments))
    try:
        for call in (
            subject.reset_free_block_queue_order,
            subject.free_block_queue_stats,
            lambda: subject.reset_prefix_cache(reorder_free_queue=True),
        ):
            with pytest.raises(RuntimeError, match=f"in the middle of {what}: call between steps"):
                call()
        assert order(engine_core) == [5, 4, 3, 2, 1]
    finally:
        step.end()
    assert step.outputs == [True if name == "reset_prefix_cache" else "output"]
    assert subject.reset_free_block_queue_order() is True


def test_in_the_middle_of_a_step_of_the_same_thread(host: FakeVLLM) -> None:
    """A callback, or a signal handler."""
    client = host.make("InprocClient", core(host))
    client.step = client.reset_free_block_queue_order
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        client.get_output()
    assert client.reset_free_block_queue_order() is True


def test_calls_from_several_threads_wait_for_each_other(host: FakeVLLM) -> None:
    """Somebody who watches the figures makes no reset fail."""
    client = host.make("InprocClient", core(host, 2000))
    subject = llm(host, client)
    over = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not over.is_set():
            seen.append(subject.free_block_queue_stats()["free"])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        answers = [subject.reset_free_block_queue_order() for _ in range(50)]
        client.get_output()
    finally:
        over.set()
        watcher.join()
        sys.setswitchinterval(interval)
    assert answers == [True] * 50
    assert set(seen) == {1999}


def test_another_event_loop(host: FakeVLLM) -> None:
    client = host.make("AsyncMPClient", core(host))
    subject = host.make("AsyncLLM", client)
    owner = asyncio.new_event_loop()
    try:
        client.resources.output_queue_task = owner.create_task(asyncio.sleep(0))
        with pytest.raises(RuntimeError, match=r"another event loop.*run_coroutine_threadsafe"):
            asyncio.run(subject.reset_free_block_queue_order())
        assert client.sent == []
        assert owner.run_until_complete(subject.reset_free_block_queue_order()) is True
    finally:
        owner.close()


def test_after_shutdown(host: FakeVLLM) -> None:
    """vLLM shuts a client down when its engine core has died, too: its own error says so."""
    client = host.make("InprocClient", core(host))
    client.shutdown()
    with pytest.raises(RuntimeError, match="has been shut down"):
        llm(host, client).reset_free_block_queue_order()
    dead = vars(host.modules["vllm.v1.engine.exceptions"])["EngineDeadError"]
    client = host.make("SyncMPClient", core(host))
    client.resources.engine_dead = True
    with pytest.raises(dead, match="has been shut down"):
        llm(host, client).free_block_queue_stats()
    client = host.make("AsyncMPClient", core(host))
    client.resources.engine_dead = True
    late = host.make("AsyncLLM", client).reset_prefix_cache(reorder_free_queue=True)
    with pytest.raises(dead, match="has been shut down"):
        asyncio.run(late)


def test_restore_takes_every_method_back(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeVLLM(monkeypatch)
    before = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    entry.register()
    assert host.snapshot() != before
    entry.restore()
    assert host.snapshot() == before


def test_a_method_that_was_replaced_after_us_is_not_overwritten(host: FakeVLLM) -> None:
    core_class = vars(host.modules[surface.CORE])["EngineCore"]
    ours = core_class.reset_prefix_cache
    core_class.reset_prefix_cache = lambda self: True
    active = host.snapshot()
    with pytest.raises(ConflictError, match=r"EngineCore\.reset_prefix_cache has been replaced"):
        entry.restore()
    assert host.snapshot() == active
    core_class.reset_prefix_cache = ours


# What somebody does to the classes, the error, and words of the sentence.
BENT: dict[str, tuple[str, type[Exception], list[str]]] = {
    "another argument": (
        "LLM.reset_prefix_cache = lambda self, device=None: True",
        UnsupportedVLLMError,
        ["LLM.reset_prefix_cache(device)", "made for this vLLM"],
    ),
    "another argument, by somebody else": (
        "def f(self, reset_running_requests=False, reset_connector=False, log=True): ...\n"
        "f.__module__ = 'rival.llm'\n"
        "LLM.reset_prefix_cache = f",
        ConflictError,
        ["LLM.reset_prefix_cache has been replaced by rival.llm.f", "switch that plugin off"],
    ),
    "no plain function": (
        "from functools import partialmethod\n"
        "LLM.reset_prefix_cache = partialmethod(LLM.reset_prefix_cache)",
        ConflictError,
        ["LLM.reset_prefix_cache has been replaced by functools.partialmethod"],
    ),
    "no such method": (
        "from vllm.v1.engine.core_client import AsyncMPClient\n"
        "del AsyncMPClient._call_utility_async",
        UnsupportedVLLMError,
        ["lacks members that the order reset needs: AsyncMPClient._call_utility_async()"],
    ),
    "no such class": (
        "import sys; del sys.modules['vllm.v1.engine.async_llm'].AsyncLLM",
        UnsupportedVLLMError,
        ["AsyncLLM", "0.13.0 or later"],
    ),
    "upstream has it": (
        "LLM.reset_free_block_queue_order = lambda self: True",
        ConflictError,
        ["LLM.reset_free_block_queue_order() is there already, by vllm.entrypoints.llm"],
    ),
}


@pytest.mark.parametrize("bent", BENT)
@pytest.mark.parametrize("value", ["python", "native"])
def test_a_chain_that_is_bent_is_refused(
    monkeypatch: pytest.MonkeyPatch, bent: str, value: str
) -> None:
    edit, error, words = BENT[bent]
    host = FakeVLLM(monkeypatch)
    host.load(("# the end of all modules", edit))
    before = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, value)
    with pytest.raises(error) as caught:
        entry.register()
    for word in words:
        assert word in str(caught.value)
    caught.value.__traceback__ = None
    assert host.snapshot() == before


def test_a_wrapper_that_takes_anything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeVLLM(monkeypatch)
    host.load(
        (
            "# the end of all modules",
            "theirs = LLM.reset_prefix_cache\n"
            "LLM.calls = []\n"
            "def f(self, *args, **kwargs):\n"
            "    self.calls.append((args, kwargs))\n"
            "    return theirs(self, *args, **kwargs)\n"
            "f.__module__ = 'rival.llm'\n"
            "LLM.reset_prefix_cache = f",
        )
    )
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()
    subject = llm(host, host.make("InprocClient", core(host)))
    assert subject.reset_prefix_cache(reset_connector=True) is True
    assert subject.calls == [((False, True), {})]
    assert subject.reset_prefix_cache(reorder_free_queue=True) is True


def test_an_order_that_does_not_come_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeVLLM(monkeypatch)
    host.load(("self.fake_free_list_head += blocks", "self.fake_free_list_head += blocks[::-1]"))
    before = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, "python")
    with pytest.raises(UnsupportedVLLMError, match=r"taken back: a reset of the order .*left the"):
        entry.register()
    assert host.snapshot() == before


def test_a_coordinator_without_a_reset_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM before 0.30."""
    host = FakeVLLM(monkeypatch)
    host.load(
        (
            "    def reset_prefix_cache(self):\n        return self.block_pool.reset",
            "    def _none(self):\n        return self.block_pool.reset",
        ),
        ("return self.coordinator.reset_prefix_cache()", "return True"),
    )
    monkeypatch.setenv(QUEUE_VARIABLE, "native")
    entry.register()
    engine_core = core(host)
    assert engine_core.reset_prefix_cache(reorder_free_queue=True) is True
    assert order(engine_core) == [1, 2, 3, 4, 5]
    coordinator = engine_core.scheduler.kv_cache_manager.coordinator
    assert not hasattr(coordinator, "reset_prefix_cache")
