"""Engine cores that are killed in the middle of a run, and others that take their place.

``python crash_scenes.py MODEL OUT.json``; it is run by test_crash.py. One front-end process has
four engines, one after the other: an AsyncLLM of two data-parallel engine cores, one of one core,
and two LLMs. All but the last lose an engine core to SIGKILL. Before that, requests are aborted in
the middle of a run, and an engine sleeps.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from reset_scenes import (
    LONG,
    POOL,
    Conversation,
    Facts,
    outcome,
    outcome_of,
    play,
    sampling,
    schedule_asynchronously,
    tokens_of,
)
from scenarios import tokens
from tiny_llama import ENGINE_OPTIONS, tiny_engine

LIMITS = POOL | {"max_model_len": 1472}
SHORT = [(tokens(seed, 90), 200) for seed in range(60, 64)]
# Of these the pool holds one: together they take seconds, whatever the machine does meanwhile.
ENDLESS = [(tokens(seed, 90), 1300) for seed in range(64, 68)]
CROWD = [request for pair in zip(ENDLESS, SHORT, strict=True) for request in pair]
PATIENCE = 300  # seconds until what does not answer counts as hanging


def cores(client: Any) -> list[int]:
    """Process ids of the engine cores, by rank."""
    return [each.pid for each in client.resources.engine_manager.processes]


async def resting(llm: Any) -> Facts:
    """Once all blocks are back: what a reset of the cache recorded, and the figures, if any."""
    extra = {"reorder_free_queue": True} if hasattr(llm, "free_block_queue_stats") else {}
    deadline = time.monotonic() + PATIENCE
    while not await llm.reset_prefix_cache(**extra):
        assert time.monotonic() < deadline, "blocks are not freed"
        await asyncio.sleep(0.05)
    return {"stats": await llm.free_block_queue_stats()} if extra else {}


async def aborts(talk: Conversation, size: int) -> Facts:
    """Every second request of a crowd, while some run and some wait."""
    begun = asyncio.Event()
    crowd = [(each, rank) for each in CROWD for rank in range(size)]
    asked = [
        asyncio.create_task(talk.ask(request, rank, begun, request_id=f"crowd {index}"))
        for index, (request, rank) in enumerate(crowd)
    ]
    await begun.wait()
    aborted = [f"crowd {index}" for index, (each, _) in enumerate(crowd) if each in ENDLESS]
    await talk.llm.abort(aborted)
    ends = [await each for each in asked]
    return {
        "reasons": [end.outputs[0].finish_reason for end in ends],
        "tokens": [tokens_of(end) for end in ends if end.outputs[0].finish_reason == "length"],
    }


async def killed(talk: Conversation, size: int) -> Facts:
    """The last core, while requests run, and while a call waits for its answer."""
    llm = talk.llm
    pid = cores(llm.engine_core)[-1]
    begun = asyncio.Event()
    running = [asyncio.create_task(talk.ask(request, size - 1, begun)) for request in ENDLESS]
    await begun.wait()
    os.kill(pid, signal.SIGSTOP)
    calls = []
    if hasattr(llm, "free_block_queue_stats"):
        calls = [asyncio.create_task(outcome_of(llm.free_block_queue_stats))]
    await asyncio.sleep(0.5)  # what it has sent before arrives
    facts: Facts = {
        "unfinished": sum(not each.done() for each in running),
        "unanswered": sum(not call.done() for call in calls),
    }
    os.kill(pid, signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), PATIENCE)
    facts["running"] = [type(end).__name__ for end in ends]
    facts["waiting"] = [await asyncio.wait_for(call, PATIENCE) for call in calls]
    later = [lambda: talk.ask(LONG)]
    if calls:
        later += [llm.reset_free_block_queue_order, llm.free_block_queue_stats]
    facts["later"] = [await asyncio.wait_for(outcome_of(call), PATIENCE) for call in later]
    return facts


async def async_scenes(model: Path, size: int) -> Facts:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = ENGINE_OPTIONS | LIMITS | {"data_parallel_size": size}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **options))
    try:
        talk = Conversation(llm)
        return {
            "cores": len(cores(llm.engine_core)),
            "scheduling": llm.vllm_config.scheduler_config.async_scheduling,
            "round": await talk.play(),
            "alone": [await talk.generate(request) for request in SHORT],
            "aborts": await aborts(talk, size),
            "after aborts": await resting(llm),
            "killed": await killed(talk, size),
        }
    finally:
        llm.shutdown()


def begin(engine: Any, name: str) -> None:
    """Requests without end, the first of which has its first token."""
    for number, (prompt, output) in enumerate(ENDLESS):
        engine.add_request(f"{name} {number}", {"prompt_token_ids": prompt}, sampling(output))
    while not engine.step():
        pass


def asleep(llm: Any) -> Facts:
    """Level 1 in the middle of a run: all that ran is aborted, and all blocks are back."""
    engine = llm.llm_engine
    begin(engine, "asleep")
    llm.sleep(level=1)
    llm.wake_up()
    ends: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        ends |= {each.request_id: each for each in engine.step() if each.finished}
    return {"reasons": [end.outputs[0].finish_reason for end in ends.values()]}


def llm_scenes(model: Path, *, kill: bool) -> Facts:
    with tiny_engine(model, **LIMITS) as llm:
        facts: Facts = {
            "cores": len(cores(llm.llm_engine.engine_core)),
            "scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
            "round": play(llm),
            "asleep": asleep(llm),
        }
        extra = hasattr(llm, "free_block_queue_stats")
        assert llm.reset_prefix_cache(**({"reorder_free_queue": True} if extra else {}))
        facts["after asleep"] = {"stats": llm.free_block_queue_stats()} if extra else {}
        if kill:
            facts["killed"] = llm_killed(llm, extra)
    return facts


def llm_killed(llm: Any, extra: bool) -> Facts:
    """vLLM's LLM itself, if it waits for a step when its core is killed, waits for ever."""
    engine = llm.llm_engine
    client = engine.engine_core
    begin(engine, "killed")
    (pid,) = cores(client)
    os.kill(pid, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        calls = [threads.submit(outcome, llm.free_block_queue_stats)] if extra else []
        time.sleep(0.5)
        while not client.outputs_queue.empty():
            engine.step()
        facts: Facts = {
            "unfinished": engine.get_num_unfinished_requests(),
            "unanswered": sum(not call.done() for call in calls),
        }
        os.kill(pid, signal.SIGKILL)
        facts["waiting"] = [call.result(PATIENCE) for call in calls]
    deadline = time.monotonic() + PATIENCE
    while not client.resources.engine_dead:  # vLLM looks for it in a thread
        assert time.monotonic() < deadline, "nobody has noticed"
        time.sleep(0.01)
    later = [lambda: play(llm)]
    if extra:
        later += [llm.reset_free_block_queue_order, llm.free_block_queue_stats]
    return facts | {"later": [outcome(call) for call in later]}


async def all_async_scenes(model: Path) -> Facts:
    facts = {"two cores": await async_scenes(model, 2)}
    schedule_asynchronously()
    return facts | {"one core": await async_scenes(model, 1)}


def main(model: str, out: str) -> None:
    facts = asyncio.run(all_async_scenes(Path(model)))
    facts["LLM"] = llm_scenes(Path(model), kill=True)
    facts["second LLM"] = llm_scenes(Path(model), kill=False)
    Path(out).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
