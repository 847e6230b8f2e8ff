"""The recorder on the installed vLLM's own scheduler, without a model."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scheduler_alone
from implementations import HAS_VLLM
from pools import splits_by_hash
from scheduler_alone import (
    BLOCK_SIZE,
    full_attention,
    make_request,
    make_scheduler,
    schedule,
    sliding_window,
    step,
)
from tiny_llama import write_tiny_llama

from pyblockpool import trace_writer
from pyblockpool.errors import ConflictError
from pyblockpool.plugin import entry, recorder, surface
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")

QUEUES = [None, "python", "native", "native:sorted", "native:extent"]
Line = dict[str, Any]
Warnings = Callable[[], list[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def switch_on(monkeypatch: pytest.MonkeyPatch, trace: Path) -> Callable[..., None]:
    def switch(queue: str | None = None, name: str | None = None) -> None:
        if queue is not None:
            monkeypatch.setenv(QUEUE_VARIABLE, queue)
        monkeypatch.setenv(TRACE_VARIABLE, name or str(trace))
        entry.register()

    return switch


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Warnings:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    name = "vllm.plugins.pyblockpool"
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name == name
    ]


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def requests_of(path: Path) -> list[Line]:
    return [line for line in lines_of(path) if "request" in line]


def spelled(runs: list[list[int]]) -> list[int]:
    return [first + (n if first else 0) for first, count in runs for n in range(count)]


def tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(512) for _ in range(count)]


def finish(scheduler: Any, *request_ids: str) -> None:
    from vllm.v1.request import RequestStatus

    names = request_ids or tuple(scheduler.requests)
    scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


def block_sizes(tokens: int) -> dict[str, int]:
    """The arguments of KVCacheManager that say it; older releases have fewer."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    known = inspect.signature(KVCacheManager.__init__).parameters
    return {name: tokens for name in ("scheduler_block_size", "hash_block_size") if name in known}


def close(scheduler: Any) -> None:
    section = recorder.section_of(scheduler.kv_cache_manager)
    assert section is not None
    section.close()


def watched(base: Any) -> Any:
    """A scheduler that notes each table the moment before it is given up, and each hit."""

    class Watched(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen: list[Line] = []
            self.hits: dict[str, int] = {}
            super().__init__(*args, **kwargs)
            if not hasattr(base, "_free_request_blocks"):  # before vLLM 0.24
                free = self.kv_cache_manager.free

                def note_and_free(request: Any) -> None:
                    self._note(request)
                    free(request)

                self.kv_cache_manager.free = note_and_free

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            scheduled = super().schedule(*args, **kwargs)
            for new in scheduled.scheduled_new_reqs:
                self.hits[new.req_id] = new.num_computed_tokens
            cached = scheduled.scheduled_cached_reqs
            for request_id, hit in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self.hits[request_id] = hit
            return scheduled

        def _free_request_blocks(self, request: Any) -> None:
            self._note(request)
            super()._free_request_blocks(request)

        def _note(self, request: Any) -> None:
            outcomes = {
                "RUNNING": "preempted",
                "FINISHED_ABORTED": "abort",
                "FINISHED_LENGTH_CAPPED": "length",
            }
            tables = self.kv_cache_manager.get_block_ids(request.request_id)
            for group, table in enumerate(tables):
                self.seen.append(
                    {
                        "request": request.request_id,
                        "outcome": outcomes[request.status.name],
                        "group": group,
                        "prompt": request.num_prompt_tokens,
                        "tokens": request.num_computed_tokens,
                        "hit": self.hits.get(request.request_id, 0) if any(tables) else 0,
                        "blocks": len(table),
                        "table": table,
                    }
                )

    return Watched


def live(scheduler: Any, seed: int, steps: int) -> None:
    """Requests that share prefixes, grow, are preempted, abort, and are reset in their midst."""
    dice = random.Random(seed)
    shared = tokens(seed, 20 * BLOCK_SIZE)
    pending: list[Any] = []
    number = 0
    for _ in range(steps):
        if dice.random() < 0.5:
            number += 1
            prompt = shared[: dice.randint(0, 20) * BLOCK_SIZE] + tokens(
                1000 * seed + number, dice.randint(1, 150)
            )
            scheduler.add_request(make_request(f"cmpl-{number}", prompt, dice.randint(1, 60)))
        if dice.random() < 0.04 and scheduler.requests:
            finish(scheduler, dice.choice(list(scheduler.requests)))
        if dice.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=dice.random() < 0.3)
        pending.append(schedule(scheduler))
        # An asynchronous scheduler is ahead of the model by a step.
        if len(pending) > (1 if hasattr(scheduler, "_spec_token_placeholders") else 0):
            scheduler.update_from_output(*pending.pop(0))
    for scheduled in pending:
        scheduler.update_from_output(*scheduled)
    finish(scheduler)


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("base", ["Scheduler", "AsyncScheduler"])
@pytest.mark.parametrize("queue", QUEUES)
def test_each_table_is_recorded_as_it_was(
    model: Path,
    trace: Path,
    switch_on: Callable[..., None],
    warnings: Warnings,
    queue: str | None,
    base: str,
    hybrid: bool,
) -> None:
    from vllm.v1.core.sched import async_scheduler, scheduler

    if queue is not None and ":" in queue and not splits_by_hash():
        pytest.skip("placement needs vLLM 0.24.0 or later")
    switch_on(queue)
    bases = {**vars(scheduler), **vars(async_scheduler)}
    subject = make_scheduler(
        model,
        num_blocks=160,
        scheduler_class=watched(bases[base]),
        kv_cache_specs=[full_attention(), sliding_window(4 * BLOCK_SIZE)] if hybrid else (),
        max_num_seqs=16,
        max_num_batched_tokens=128,
    )
    live(subject, seed=3, steps=600)
    close(subject)
    recorded = []
    for line in requests_of(trace):
        assert line.pop("t") >= 0
        assert (prefill := line.pop("prefill")) is None or prefill > 0
        recorded.append(line | {"table": spelled(line.pop("runs"))})
    assert recorded == subject.seen
    outcomes = {line["outcome"] for line in recorded}
    assert outcomes == {"length", "abort", "preempted"}
    assert max(line["hit"] for line in recorded) > 5 * BLOCK_SIZE
    assert any(0 in line["table"] for line in recorded) == hybrid
    end = lines_of(trace)[-1]
    groups = 2 if hybrid else 1
    assert (end["requests"], end["lost"]) == (len(recorded) // groups, 0)
    assert len(recorded) > 200
    assert warnings() == []


# The header.


@pytest.mark.parametrize("queue", QUEUES)
def test_the_header(
    model: Path, trace: Path, switch_on: Callable[..., None], queue: str | None
) -> None:
    """What the pool really is, not what the variable says."""
    if queue is not None and ":" in queue and not splits_by_hash():
        pytest.skip("placement needs vLLM 0.24.0 or later")
    switch_on(queue)
    close(make_scheduler(model, num_blocks=48, caching=queue is None))
    header = lines_of(trace)[0]
    policy = (queue or "python").removeprefix("native:")
    started = header.pop("started")
    assert started.endswith("+00:00")
    assert header == {
        "block_trace": 1,
        "pyblockpool": "0.1.0",
        "vllm": surface.vllm_version(),
        "queue": queue,
        "policy": "lru" if policy in ("python", "native") else policy,
        "implementation": "native" if queue and "native" in queue else "vllm",
        "extent": 8 if policy == "extent" else None,
        "model": str(model),
        "attention": None,
        "pid": os.getpid(),
        "dp_rank": None,
        "num_blocks": 48,
        "caching": queue is None,
        "groups": [{"block_size": BLOCK_SIZE, "kind": "FullAttentionSpec", "layers": 1}],
    }


def test_the_header_of_a_scheduler_of_somebody_else(
    trace: Path, switch_on: Callable[..., None]
) -> None:
    """It tells no model. Under context parallelism a block holds tokens of all ranks."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    switch_on()
    layers = ["layer.0", "layer.1"]
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=24,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layers, full_attention())],
        ),
        max_model_len=512,
        dcp_world_size=2,
        **block_sizes(2 * BLOCK_SIZE),
    )
    del manager
    header, end = lines_of(trace)
    assert (header["model"], header["attention"], header["dp_rank"]) == (None, None, None)
    assert header["groups"] == [
        {"block_size": 2 * BLOCK_SIZE, "kind": "FullAttentionSpec", "layers": 2}
    ]
    assert end["end"] == "closed"


def test_a_model_without_a_kv_cache(
    trace: Path, switch_on: Callable[..., None], warnings: Warnings
) -> None:
    """A pooling model of encoders alone, say: there is nothing to tell, and no file."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    switch_on()
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
        max_model_len=512,
        enable_caching=False,
        **block_sizes(BLOCK_SIZE),
    )
    assert recorder.section_of(manager) is None
    assert not trace.exists()
    assert warnings() == []


def test_attention_backends() -> None:
    def layer(backend: str) -> Any:
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))

    layers = {"a": layer("FLASH_ATTN"), "b": layer("FLASH_ATTN"), "c": layer("FLEX_ATTENTION")}
    cache = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"]), SimpleNamespace(layer_names="c")]
    )
    asked = SimpleNamespace(backend=SimpleNamespace(name="TRITON_ATTN"))

    def told(layers: Any, **more: Any) -> str | None:
        compiled = SimpleNamespace(static_forward_context=layers)
        return recorder._attention(SimpleNamespace(compilation_config=compiled, **more), cache)

    assert told(layers, attention_config=asked) == "FLASH_ATTN, FLEX_ATTENTION"
    assert told({}, attention_config=asked) == "TRITON_ATTN"
    assert told({}, attention_config=SimpleNamespace(backend=None)) is None
    assert told({"a": object()}) is None


def test_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(index: int, rank: int, size: int) -> int | None:
        return recorder._dp_rank(
            SimpleNamespace(
                data_parallel_index=index, data_parallel_rank=rank, data_parallel_size=size
            )
        )

    assert told(index=0, rank=0, size=1) is None
    assert told(index=0, rank=0, size=2) == 0
    assert told(index=1, rank=1, size=2) == 1
    assert told(index=1, rank=0, size=1) == 1, "of a dense model"
    process = SimpleNamespace(name="EngineCore_DP0")
    monkeypatch.setattr(multiprocessing, "current_process", lambda: process)
    assert told(index=0, rank=0, size=1) == 0, "of a dense model"


# The time that a prefill takes: from the step that schedules it to the end of that in which the
# first token comes.


class Clock:
    """Half a second passes in each half of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(recorder, "monotonic", lambda: self.now)

    def step(self, scheduler: Any) -> None:
        self.now += 0.5
        plan = schedule(scheduler)
        self.now += 0.5
        scheduler.update_from_output(*plan)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def prefills(scheduler: Any, trace: Path) -> list[tuple[str, str, float | None]]:
    close(scheduler)
    return [(line["request"], line["outcome"], line["prefill"]) for line in requests_of(trace)]


def test_prefill_in_chunks(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    switch_on()
    subject = make_scheduler(model, num_blocks=48, max_num_batched_tokens=64)
    subject.add_request(make_request("three chunks", tokens(1, 160), 3))
    for _ in range(5):
        clock.step(subject)
    subject.add_request(make_request("one token", tokens(2, 20), 1))
    clock.step(subject)
    subject.add_request(make_request("aborted in its prefill", tokens(3, 160), 9))
    clock.step(subject)
    finish(subject, "aborted in its prefill")
    subject.add_request(make_request("aborted later", tokens(4, 20), 9))
    clock.step(subject)
    finish(subject, "aborted later")
    subject.add_request(make_request("never scheduled", tokens(5, 20), 9))
    finish(subject, "never scheduled")
    assert prefills(subject, trace) == [
        ("three chunks", "length", 2.5),
        ("one token", "length", 0.5),
        ("aborted in its prefill", "abort", None),
        ("aborted later", "abort", 0.5),
        ("never scheduled", "abort", None),
    ]


def test_waiting_is_no_prefill(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    """Looked up in each step, admitted when there is room: and with what hit it has then."""
    switch_on()
    subject = make_scheduler(model, num_blocks=13, max_num_batched_tokens=256)
    shared = tokens(1, 5 * BLOCK_SIZE)
    subject.add_request(make_request("first", shared + tokens(2, 4 * BLOCK_SIZE), 6))
    clock.step(subject)
    subject.add_request(make_request("second", shared + tokens(3, 5 * BLOCK_SIZE), 2))
    for _ in range(4):
        clock.step(subject)
        assert not subject.requests["second"].num_computed_tokens
    for _ in range(3):
        clock.step(subject)
    assert prefills(subject, trace) == [("first", "length", 0.5), ("second", "length", 0.5)]
    assert [line["hit"] for line in requests_of(trace)] == [0, 5 * BLOCK_SIZE]


def test_prefill_around_a_preemption(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    """Each table has the prefill that was made with it, once."""
    switch_on()
    subject = make_scheduler(model, num_blocks=48, max_num_batched_tokens=64)
    subject.add_request(make_request("early", tokens(1, 160), 3))
    clock.step(subject)
    assert subject.reset_prefix_cache(reset_running_requests=True)
    clock.step(subject)
    clock.step(subject)
    clock.step(subject)
    assert subject.requests["early"].num_output_tokens == 1
    assert subject.reset_prefix_cache(reset_running_requests=True)
    for _ in range(4):
        clock.step(subject)
    assert prefills(subject, trace) == [
        ("early", "preempted", None),
        ("early", "preempted", 2.5),
        ("early", "length", 2.5),
    ]
    resets = [line["reset"] for line in lines_of(trace) if "reset" in line]
    assert resets == ["prefix_cache", "prefix_cache"]


def test_prefill_behind_blocks_that_are_loaded(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    """A KV connector fills the blocks first: the prefill begins when the request runs."""
    from vllm.v1.request import RequestStatus

    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    request = make_request("loaded", tokens(1, 100), 2)
    manager = subject.kv_cache_manager
    manager.get_computed_blocks(request)
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    subject.requests["loaded"] = request
    for _ in range(3):
        clock.step(subject)
    clock.now += 0.25
    manager.allocate_slots(request, 100)
    manager.free(request)  # the load has failed
    request.status = RequestStatus.WAITING
    subject.waiting.add_request(request)
    manager.get_computed_blocks(request)
    clock.step(subject)
    clock.step(subject)
    assert prefills(subject, trace) == [
        ("loaded", "preempted", None),
        ("loaded", "length", 0.5),
    ]


def test_an_end_whose_blocks_a_connector_still_holds(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    """They are given up in a later step; what was found in the prefix cache is told anyway."""
    from vllm.v1.request import RequestStatus

    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    manager = subject.kv_cache_manager
    prompt = tokens(1, 3 * BLOCK_SIZE)
    subject.add_request(make_request("first", prompt, 1))
    clock.step(subject)
    request = make_request("held", [*prompt, 1, 2], 9)
    computed = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 2, 3 * BLOCK_SIZE, computed[0])
    request.status = RequestStatus.FINISHED_ABORTED
    for _ in range(2):
        subject.add_request(make_request(f"other {clock.now}", tokens(2, 20), 1))
        clock.step(subject)
    manager.free(request)
    close(subject)
    (line,) = (each for each in requests_of(trace) if each["request"] == "held")
    assert (line["outcome"], line["hit"], line["prefill"]) == ("abort", 3 * BLOCK_SIZE, None)


def test_a_step_that_fails(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    """Who goes on behind it: what is freed between steps has no first token then."""
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    subject.add_request(make_request("cmpl-1", tokens(1, 20), 9))
    with pytest.raises(AttributeError):
        subject.update_from_output(subject.schedule(), None)
    subject.requests["cmpl-1"].append_output_token_ids(7)
    finish(subject)
    assert prefills(subject, trace) == [("cmpl-1", "abort", None)]


def test_prefill_of_an_asynchronous_scheduler(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    switch_on()
    subject = make_scheduler(model, num_blocks=48, scheduler_class=AsyncScheduler)
    subject.add_request(make_request("first", tokens(1, 20), 9))
    ahead = schedule(subject)
    subject.add_request(make_request("second", tokens(2, 20), 1))
    for _ in range(4):
        clock.now += 1.0
        following = schedule(subject)
        subject.update_from_output(*ahead)
        ahead = following
    finish(subject)
    assert prefills(subject, trace) == [("second", "length", 1.0), ("first", "abort", 1.0)]


def test_a_step_of_somebody_else(
    model: Path, trace: Path, switch_on: Callable[..., None], clock: Clock
) -> None:
    """Where the end of a step is not seen, no time is told, rather than a wrong one."""
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    step_of_vllm = type(subject).update_from_output.__wrapped__
    subject.update_from_output = lambda *arguments: step_of_vllm(subject, *arguments)
    subject.add_request(make_request("cmpl-1", tokens(1, 20), 5))
    for _ in range(5):
        clock.step(subject)
    assert prefills(subject, trace) == [("cmpl-1", "length", None)]


def test_blocks_that_are_freed_later(
    model: Path, trace: Path, switch_on: Callable[..., None]
) -> None:
    """vLLM takes the table of a request at once, and gives its blocks back when a step is over."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    if not hasattr(KVCacheManager, "pop_blocks_for_free"):
        pytest.skip("all blocks are freed at once before vLLM 0.24.0")
    switch_on()
    subject = make_scheduler(model, num_blocks=48, scheduler_class=AsyncScheduler)
    subject.defer_block_free = True
    subject.add_request(make_request("cmpl-1", tokens(1, 40), 9))
    plan = schedule(subject)
    table = subject.kv_cache_manager.get_block_ids("cmpl-1")[0]
    finish(subject, "cmpl-1")
    assert subject.kv_cache_manager.block_pool.get_num_free_blocks() == 47 - 3
    subject.update_from_output(*plan)
    close(subject)
    (line,) = requests_of(trace)
    assert (line["outcome"], spelled(line["runs"]), len(table)) == ("abort", table, 3)


def test_tables_of_another_pool_are_left_out(
    model: Path, trace: Path, switch_on: Callable[..., None]
) -> None:
    """Blocks of a tier in host memory have ids of their own."""
    from vllm.v1.core.block_pool import BlockPool

    switch_on()
    subject = make_scheduler(
        model, num_blocks=96, kv_cache_specs=[full_attention(), sliding_window(64)], caching=False
    )
    host = BlockPool(16, False, BLOCK_SIZE)
    subject.kv_cache_manager.coordinator.single_type_managers[0].block_pool = host
    subject.add_request(make_request("cmpl-1", tokens(1, 40), 2))
    while subject.requests:
        step(subject)
    close(subject)
    (line,) = requests_of(trace)
    assert (line["group"], line["runs"]) == (1, [[1, 3]])


# Resets.


@pytest.mark.parametrize("queue", QUEUES[:3])
def test_resets(
    model: Path, trace: Path, switch_on: Callable[..., None], queue: str | None
) -> None:
    switch_on(queue)
    subject = make_scheduler(model, num_blocks=48)
    subject.add_request(make_request("cmpl-1", tokens(1, 40), 2))
    step(subject)
    assert not subject.reset_prefix_cache()
    if queue:
        assert not subject.reset_free_block_queue_order()
    step(subject)
    assert subject.reset_prefix_cache()
    if queue:
        assert subject.reset_free_block_queue_order()
        assert subject.reset_prefix_cache(reorder_free_queue=True)
        assert subject.kv_cache_manager.reset_prefix_cache(reorder_free_queue=True)
    close(subject)
    told = [line.get("reset", "") + str(line.get("done", "")) for line in lines_of(trace)[1:-1]]
    assert told == (
        ["prefix_cacheFalse", "", "prefix_cacheTrue"]
        if queue is None
        else ["prefix_cacheFalse", "orderFalse", "", "prefix_cacheTrue", "orderTrue"]
        + ["prefix_cacheTrue", "orderTrue"] * 2
    )


# One file and several engines.


def test_engines_one_after_the_other(
    model: Path, trace: Path, switch_on: Callable[..., None], warnings: Warnings
) -> None:
    """Each is a section; the end of one that is dropped without a word comes with its manager."""
    switch_on("native")
    for number in range(3):
        subject = make_scheduler(model, num_blocks=48 + number)
        subject.add_request(make_request(f"cmpl-{number}", tokens(number, 40), 2))
        while subject.requests:
            step(subject)
        if number == 1:
            close(subject)
        del subject
    lines = lines_of(trace)
    starts = [line["num_blocks"] for line in lines if "num_blocks" in line]
    assert (starts, len(lines)) == ([48, 49, 50], 9)
    assert [line["requests"] for line in lines if "end" in line] == [1, 1, 1]
    assert warnings() == []


def test_an_engine_beside_another(
    model: Path, trace: Path, switch_on: Callable[..., None], warnings: Warnings
) -> None:
    switch_on()
    first = make_scheduler(model, num_blocks=48)
    second = make_scheduler(model, num_blocks=64)
    (sentence,) = warnings()
    assert "%p" in sentence
    assert str(trace) in sentence
    for subject in (first, second):
        subject.add_request(make_request("cmpl-1", tokens(1, 40), 2))
        while subject.requests:
            step(subject)
    assert recorder.section_of(second.kv_cache_manager) is None
    close(first)
    assert [line.get("num_blocks") for line in lines_of(trace)] == [48, None, None]
    third = make_scheduler(model, num_blocks=80)
    close(third)
    assert lines_of(trace)[3]["num_blocks"] == 80
    assert len(warnings()) == 1


def test_an_engine_beside_another_that_has_the_process_in_the_name(
    model: Path, tmp_path: Path, switch_on: Callable[..., None], warnings: Warnings
) -> None:
    """No advice that was followed."""
    switch_on(name=str(tmp_path / "%p.jsonl"))
    first = make_scheduler(model, num_blocks=48)
    make_scheduler(model, num_blocks=64)
    (sentence,) = warnings()
    assert "one is recorded at a time" in sentence
    assert "Put %p" not in sentence
    close(first)


def test_an_engine_that_is_garbage_does_not_keep_the_file(
    model: Path, trace: Path, switch_on: Callable[..., None], warnings: Warnings
) -> None:
    switch_on()
    first = make_scheduler(model, num_blocks=48)
    first.kv_cache_manager.itself = first.kv_cache_manager
    del first
    close(make_scheduler(model, num_blocks=64))
    assert [line.get("num_blocks") for line in lines_of(trace)] == [48, None, 64, None]
    assert warnings() == []


@pytest.mark.parametrize("kept", [True, False])
def test_an_engine_whose_recording_is_just_being_ended(
    model: Path,
    trace: Path,
    switch_on: Callable[..., None],
    warnings: Warnings,
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
) -> None:
    """By a thread that does not wait for it, as that of the file itself may be."""
    switch_on()
    first = make_scheduler(model, num_blocks=48)
    section = recorder.section_of(first.kv_cache_manager)
    assert section is not None
    end = section.writer._write_end

    def end_slowly(why: str) -> None:
        time.sleep(0.3)
        end(why)

    monkeypatch.setattr(section.writer, "_write_end", end_slowly)
    section.writer.stop()
    section.close.cancel()
    if not kept:
        del first, section
    close(make_scheduler(model, num_blocks=64))
    assert [line.get("num_blocks") for line in lines_of(trace)] == [48, None, 64, None]
    assert warnings() == []


def test_the_process_in_the_name(
    model: Path, tmp_path: Path, switch_on: Callable[..., None]
) -> None:
    switch_on(name=str(tmp_path / "%p" / "%p.jsonl"))
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    close(make_scheduler(model, num_blocks=48))
    assert lines_of(folder / f"{os.getpid()}.jsonl")[0]["pid"] == os.getpid()


# The engine goes on whatever happens.


def serve(scheduler: Any, count: int = 3) -> None:
    for number in range(count):
        scheduler.add_request(make_request(f"cmpl-{number}", tokens(number, 40), 3))
    for _ in range(20):
        step(scheduler)
    assert not scheduler.requests
    assert scheduler.reset_prefix_cache()
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize("what", ["no such folder", "a folder", "something else"])
def test_a_file_that_cannot_be_written(
    model: Path, trace: Path, switch_on: Callable[..., None], warnings: Warnings, what: str
) -> None:
    if what == "a folder":
        trace.mkdir()
    elif what == "something else":
        trace.write_text("my notes\n", encoding="utf-8")
    switch_on(name=str(trace / "deeper") if what == "no such folder" else str(trace))
    if what == "no such folder":
        trace.write_text("", encoding="utf-8")
    subject = make_scheduler(model, num_blocks=48)
    serve(subject)
    (sentence,) = warnings()
    assert TRACE_VARIABLE in sentence
    assert str(trace) in sentence
    assert not trace.is_file() or trace.read_text(encoding="utf-8") in ("", "my notes\n")


class Odd:
    """Stands for a request, or a manager, that is not what it was."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize("method", ["freed", "looked_up", "stepped"])
def test_an_error_while_recording(
    model: Path,
    trace: Path,
    switch_on: Callable[..., None],
    warnings: Warnings,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """One warning, the recording ends, and what was recorded stays."""
    switch_on()
    subject = make_scheduler(model, num_blocks=48, max_num_batched_tokens=64)
    serve(subject)
    original = getattr(recorder.Section, method)
    odd = Odd()

    def of_something_odd(section: Any, *arguments: Any) -> None:
        section.waiting[odd] = (0.0, 0, 0)
        original(section, arguments[0], *(odd for _ in arguments[1:]))

    monkeypatch.setattr(recorder.Section, method, of_something_odd)
    subject.add_request(make_request("in chunks", tokens(1, 160), 3))
    for _ in range(9):
        step(subject)
    assert not subject.requests
    (sentence,) = warnings()
    assert "recording of block tables has ended" in sentence
    assert recorder.section_of(subject.kv_cache_manager) is None
    serve(subject)
    assert len(warnings()) == 1
    entry.restore()
    assert [line["request"] for line in requests_of(trace)] == ["cmpl-0", "cmpl-1", "cmpl-2"]
    assert lines_of(trace)[-1]["end"] == "closed"


def test_an_unknown_answer_of_the_prefix_cache(
    model: Path, switch_on: Callable[..., None], warnings: Warnings
) -> None:
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    section = recorder.section_of(subject.kv_cache_manager)
    assert section is not None
    section.looked_up(subject.kv_cache_manager, make_request("cmpl-1", tokens(1, 40), 3), None)
    assert len(warnings()) == 1
    serve(subject)


def test_a_section_that_is_full(
    model: Path,
    trace: Path,
    switch_on: Callable[..., None],
    warnings: Warnings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_writer, "INTERVAL", 0.001)
    monkeypatch.setattr(trace_writer, "MAX_BYTES", 3000)
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    while recorder.section_of(subject.kv_cache_manager):
        serve(subject)
    serve(subject)
    assert lines_of(trace)[-1]["end"] == "size limit"
    assert trace.stat().st_size < 3000
    assert len(warnings()) == 1


# Bounds.


def test_memory_and_file_over_many_requests(
    model: Path,
    trace: Path,
    switch_on: Callable[..., None],
    warnings: Warnings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm#44175: as much after many requests as after few, and of each finished request nothing.

    The limits are as small as the number of requests; what would grow with it would show.
    """
    monkeypatch.setattr(trace_writer, "INTERVAL", 0.01)
    monkeypatch.setattr(trace_writer, "MAX_BYTES", 600_000)
    monkeypatch.setattr(trace_writer, "MAX_WAITING", 20_000)
    switch_on("native")
    subject = make_scheduler(model, num_blocks=512, max_num_seqs=16)
    section = recorder.section_of(subject.kv_cache_manager)
    assert section is not None
    prompt = tokens(1, 20 * BLOCK_SIZE)

    def many(count: int) -> int:
        for number in range(count):
            if number % 3 == 0:  # one that is looked up, and then aborted without a block
                subject.kv_cache_manager.get_computed_blocks(
                    make_request(f"gone-{number}", prompt[:40], 1)
                )
            subject.add_request(make_request(f"cmpl-{number}", prompt, 1))
            if number % 16 == 15:
                step(subject)
        while subject.requests:
            step(subject)
        end = time.monotonic() + 20
        while section.writer._waiting and time.monotonic() < end:
            time.sleep(0.01)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        few = many(1280)  # by now the prefix cache of vLLM is full
        more = many(1280)
        assert recorder.section_of(subject.kv_cache_manager) is section
        assert more - few < 50_000, "not even the ids"
        assert not section.waiting
        most = many(1280)
    finally:
        tracemalloc.stop()
    assert most - few < 50_000
    assert recorder.section_of(subject.kv_cache_manager) is None
    assert 590_000 < trace.stat().st_size < 600_000
    end = lines_of(trace)[-1]
    assert end["end"] == "size limit"
    assert 2560 < end["requests"] < 3840
    assert len(warnings()) == 1


def do_nothing(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def give_a_picture(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=1, length=2)
    request.mm_features = [MultiModalFeatureSpec(None, "image", "picture", place)]


def give_embeddings(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request.prompt_embeds = object()


def let_the_disk_hang(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_writer, "MANY_WAITING", -1)


def test_what_a_kept_request_weighs(
    model: Path, trace: Path, switch_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of its prompt are in memory, also where it has no block: it never ran."""
    monkeypatch.setattr(trace_writer, "INTERVAL", 3600.0)
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    section = recorder.section_of(subject.kv_cache_manager)
    assert section is not None
    subject.add_request(make_request("cmpl-1", tokens(1, 160), 9))
    finish(subject, "cmpl-1")
    assert section.writer._came_in == trace_writer._RECORD + 160 // trace_writer.TOKENS_OF_A_BLOCK
    monkeypatch.setattr(trace_writer, "MANY_WAITING", trace_writer._RECORD)
    subject.add_request(make_request("cmpl-2", tokens(2, 160), 9))
    finish(subject, "cmpl-2")
    assert section.writer._came_in == 2 * trace_writer._RECORD + 10
    close(subject)
    assert section.writer._left == section.writer._came_in
    assert [line["request"] for line in requests_of(trace)] == ["cmpl-1", "cmpl-2"]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (do_nothing, True),
        (give_a_picture, False),
        (give_embeddings, False),
        (let_the_disk_hang, False),
    ],
)
def test_what_is_kept_of_a_request(
    model: Path,
    trace: Path,
    switch_on: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[..., None],
    kept: bool,
) -> None:
    """Ended requests wait for the thread themselves, but for those that hold much memory."""
    monkeypatch.setattr(trace_writer, "INTERVAL", 3600.0)
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    request = make_request("cmpl-1", tokens(1, 40), 9)
    alive = weakref.ref(request)
    subject.add_request(request)
    step(subject)
    change(request, monkeypatch)
    finish(subject, "cmpl-1")
    del request
    gc.collect()
    assert (alive() is not None) == kept
    close(subject)
    gc.collect()  # a request of vLLM 0.13 holds itself
    assert alive() is None
    (line,) = requests_of(trace)
    assert (line["request"], line["prompt"], line["tokens"]) == ("cmpl-1", 40, 40)


def test_a_preempted_request_is_not_kept(
    model: Path, trace: Path, switch_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes, and its record must not."""
    monkeypatch.setattr(trace_writer, "INTERVAL", 3600.0)
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    subject.add_request(make_request("cmpl-1", tokens(1, 40), 9))
    step(subject)
    assert subject.reset_prefix_cache(reset_running_requests=True)
    subject.requests["cmpl-1"].num_prompt_tokens = 1
    close(subject)
    line = requests_of(trace)[0]
    assert (line["outcome"], line["prompt"], line["tokens"]) == ("preempted", 40, 40)


# On and off.


def test_on_and_off(model: Path, trace: Path, switch_on: Callable[..., None]) -> None:
    """Restoring ends the recording of an engine that goes on, and leaves vLLM as it was."""
    from vllm import envs
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    classes = (KVCacheManager, Scheduler, EngineCore)
    before = [dict(vars(cls)) for cls in classes]
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    assert envs.environment_variables[TRACE_VARIABLE]() == "set"
    assert QUEUE_VARIABLE not in envs.environment_variables
    assert [dict(vars(cls)) for cls in classes] != before
    serve(subject)
    entry.restore()
    assert [dict(vars(cls)) for cls in classes] == before
    assert TRACE_VARIABLE not in envs.environment_variables
    assert [line.get("requests") for line in lines_of(trace)][-1] == 3
    serve(subject)
    assert len(requests_of(trace)) == 3


def test_restored_with_an_engine_under_native(
    model: Path, trace: Path, switch_on: Callable[..., None]
) -> None:
    """What stands in the way of the other patches leaves the recording as it is, too."""
    switch_on("native")
    subject = make_scheduler(model, num_blocks=48)
    with pytest.raises(RuntimeError, match="native queues still have blocks"):
        entry.restore()
    serve(subject)
    close(subject)
    assert lines_of(trace)[-1]["requests"] == 3


def test_methods_that_others_wrap_once_more(switch_on: Callable[..., None]) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    switch_on("python")
    for name in ("free", "reset_prefix_cache", "__init__"):
        ours = vars(KVCacheManager)[name]
        rival = functools.wraps(ours)(lambda *arguments, ours=ours: ours(*arguments))
        rival.__module__, rival.__qualname__ = "rival.trace", "wrapper"
        setattr(KVCacheManager, name, rival)
        with pytest.raises(
            ConflictError, match=rf"{name} has been replaced again, by rival\.trace"
        ):
            entry.restore()
        assert vars(KVCacheManager)[name] is rival
        setattr(KVCacheManager, name, ours)


def test_the_end_of_an_engine_core(
    model: Path, trace: Path, switch_on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is complete before anything is torn down, as the process may be killed then."""
    from vllm.v1.engine.core import EngineCore

    ended = []

    def shutdown(self: Any) -> None:
        ended.append(lines_of(trace)[-1]["end"])

    shutdown.__module__ = EngineCore.__module__
    monkeypatch.setattr(EngineCore, "shutdown", shutdown)
    switch_on()
    subject = make_scheduler(model, num_blocks=48)
    EngineCore.shutdown(SimpleNamespace(scheduler=subject))
    EngineCore.shutdown(SimpleNamespace(scheduler=subject))
    EngineCore.shutdown(SimpleNamespace(scheduler=None))
    EngineCore.shutdown(SimpleNamespace())
    assert ended == ["closed"] * 4
    entry.restore()
    assert EngineCore.shutdown is shutdown


CHILD = """
import multiprocessing, os, sys
from pathlib import Path
from scheduler_alone import make_request, make_scheduler, step

def engine(model):
    from pyblockpool.plugin import entry
    entry.register()
    subject = make_scheduler(Path(model), num_blocks=48)
    subject.add_request(make_request("cmpl-1", list(range(40)), 2))
    while subject.requests:
        step(subject)
    globals()["alive"] = subject
    assert "pyblockpool._queue" not in sys.modules

if __name__ == "__main__":
    if sys.argv[2] == "main":
        engine(sys.argv[1])
    else:
        child = multiprocessing.get_context(sys.argv[2]).Process(target=engine, args=sys.argv[1:2])
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("process", ["main", "spawn", "fork"])
def test_the_end_of_a_process(model: Path, trace: Path, process: str) -> None:
    """An engine that nobody shuts down, in a process that ends: also one of multiprocessing.

    It loads no compiled code, as the queue is vLLM's own.
    """
    script = trace.with_suffix(".py")
    script.write_text(CHILD, encoding="utf-8")
    search = [str(Path(scheduler_alone.__file__).parent), *sys.path[1:]]
    ran = subprocess.run(
        [sys.executable, str(script), str(model), process],
        env=os.environ
        | {TRACE_VARIABLE: str(trace), "PYTHONPATH": os.pathsep.join(filter(None, search))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    header, request, end = lines_of(trace)
    assert (header["queue"], request["request"], end["end"]) == (None, "cmpl-1", "closed")
