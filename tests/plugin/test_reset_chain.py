"""The order reset from every front end down to the pool, on a host that tests can bend."""

from __future__ import annotations

import asyncio
import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import FakeVLLM

from pyblockpool.errors import ConflictError, InactiveError, UnsupportedVLLMError
from pyblockpool.plugin import entry, surface
from pyblockpool.plugin.reset import LAYERS
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


class OldCore:
    """An engine core in which pyblockpool is not active."""

    def __init__(self) -> None:
        self.resets: list[tuple[bool, bool]] = []

    def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
        self.resets.append((running, connector))
        return True


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
            assert len(method.__doc__) > 100
    assert seen == 11


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
    with pytest.raises(InactiveError, match=f"set {QUEUE_VARIABLE} to native .*where|starts"):
        getattr(llm(host, host.make("SyncMPClient", old)), method)(**arguments)
    other = core(host)
    subject = host.make("AsyncLLM", host.make("AsyncMPClient", other, old))
    with pytest.raises(InactiveError, match=QUEUE_VARIABLE):
        asyncio.run(getattr(subject, method)(**arguments))
    assert old.resets == []


def test_other_errors_of_the_engine_core_pass(host: FakeVLLM) -> None:
    class Broken(OldCore):
        def reset_free_block_queue_order(self) -> bool:
            raise OSError("no such thing")

        def reset_prefix_cache(self, a: bool = False, b: bool = False, c: bool = False) -> bool:
            raise OSError("has no attribute 'nothing'")

    client = host.make("SyncMPClient", Broken())
    with pytest.raises(Exception, match="failed: no such thing") as caught:
        llm(host, client).reset_free_block_queue_order()
    assert type(caught.value) is Exception
    subject = host.make("AsyncLLM", host.make("AsyncMPClient", Broken(), core(host)))
    with pytest.raises(Exception, match="has no attribute 'nothing'") as caught:
        asyncio.run(subject.reset_prefix_cache(reorder_free_queue=True))
    assert not isinstance(caught.value, InactiveError)


def test_somebody_elses_schedulers(host: FakeVLLM) -> None:
    scheduler_class = vars(host.modules[surface.SCHEDULER])["Scheduler"]
    interface = vars(host.modules[surface.SCHEDULER_INTERFACE])["SchedulerInterface"]

    class Derived(scheduler_class):  # type: ignore[misc,valid-type]
        """Knows nothing of the new argument."""

        def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
            return bool(super().reset_prefix_cache(running, connector))

    class Unrelated:
        def __init__(self) -> None:
            self.kv_cache_manager = host.make("KVCacheManager", 6)

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


def test_a_second_thread_while_a_step_runs(host: FakeVLLM) -> None:
    engine_core = core(host)
    client = host.make("InprocClient", engine_core)
    subject = llm(host, client)
    inside, go_on = threading.Event(), threading.Event()

    def step() -> str:
        inside.set()
        assert go_on.wait(30)
        return "output"

    client.step = step
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.append(client.get_output()))
    thread.start()
    assert inside.wait(30)
    try:
        for call in (
            subject.reset_free_block_queue_order,
            subject.free_block_queue_stats,
            lambda: subject.reset_prefix_cache(reorder_free_queue=True),
        ):
            with pytest.raises(RuntimeError, match="a step of this engine is running in another"):
                call()
        assert order(engine_core) == [5, 4, 3, 2, 1]
        assert subject.reset_prefix_cache() is True, "as without the plugin"
    finally:
        go_on.set()
        thread.join()
    assert outputs == ["output"]
    assert subject.reset_free_block_queue_order() is True


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
    for kind in ("InprocClient", "SyncMPClient", "AsyncMPClient"):
        client = host.make(kind, core(host))
        client._finalizer = SimpleNamespace(alive=False)
        if kind == "AsyncMPClient":
            late = host.make("AsyncLLM", client).reset_free_block_queue_order()
            with pytest.raises(RuntimeError, match="has been shut down"):
                asyncio.run(late)
        else:
            with pytest.raises(RuntimeError, match="has been shut down"):
                llm(host, client).reset_free_block_queue_order()


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


RESET = "    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):\n"
BENT: dict[str, tuple[tuple[str, str], type[Exception], list[str]]] = {
    "another argument": (
        (
            "class LLM:",
            "class LLM:\n    reset_prefix_cache = lambda self, device=None: True\n\nclass Other:",
        ),
        UnsupportedVLLMError,
        ["LLM.reset_prefix_cache(device)", "made for this vLLM"],
    ),
    "no such method": (
        ("    async def _call_utility_async(", "    async def _ask("),
        UnsupportedVLLMError,
        ["lacks AsyncMPClient._call_utility_async()"],
    ),
    "upstream has it": (
        (
            "        self.llm_engine = engine\n",
            "        self.llm_engine = engine\n\n    def reset_free_block_queue_order(self): ...\n",
        ),
        ConflictError,
        ["already has, from elsewhere, LLM.reset_free_block_queue_order()"],
    ),
    "no such class": (
        ("class AsyncLLM:", "class AsyncEngine:"),
        UnsupportedVLLMError,
        ["AsyncLLM", "0.13.0 or later"],
    ),
}


@pytest.mark.parametrize("bent", BENT)
@pytest.mark.parametrize("value", ["python", "native"])
def test_a_chain_that_is_bent_is_refused(
    monkeypatch: pytest.MonkeyPatch, bent: str, value: str
) -> None:
    edit, error, words = BENT[bent]
    host = FakeVLLM(monkeypatch)
    host.load(edit)
    before = host.snapshot()
    monkeypatch.setenv(QUEUE_VARIABLE, value)
    with pytest.raises(error) as caught:
        entry.register()
    for word in words:
        assert word in str(caught.value)
    caught.value.__traceback__ = None
    assert host.snapshot() == before


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
