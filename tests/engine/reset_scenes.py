"""The order reset on a real engine, through every front end.

``python reset_scenes.py FRONT_END MODEL OUT.json``; it is run by test_order_reset.py. Front ends:
``in_process``, ``multi_process`` (both LLM), ``async``, ``data_parallel`` (both AsyncLLM), and
``off``: an LLM whose engine core was started without the plugin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from scenarios import tokens
from tiny_llama import ENGINE_OPTIONS, tiny_engine

POOL = {"max_model_len": 1024, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 48}
# Of different lengths: they finish out of order and shuffle the queue.
ROUND = [(tokens(seed, 60 + 70 * seed), 5 + 9 * (seed % 3)) for seed in range(5)]
LONG = (tokens(50, 100), 600)
Facts = dict[str, Any]


def schedule_asynchronously() -> None:
    """As vLLM does on a GPU by itself; on the CPU it is not allowed to."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def sampling(output: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def outcome_of(call: Callable[[], Any]) -> Any:
    try:
        return await call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def tokens_of(answer: Any) -> list[int]:
    return list(answer.outputs[0].token_ids)


# An LLM, in one process or in two.


def play(llm: Any, requests: list[tuple[list[int], int]] = ROUND) -> list[list[int]]:
    """One round; the engine gets all requests before it schedules the first."""
    llm.sleep(level=0)
    llm.enqueue(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [sampling(output) for _, output in requests],
        use_tqdm=False,
    )
    llm.wake_up(tags=["scheduling"])
    return [tokens_of(done) for done in llm.wait_for_completion(use_tqdm=False)]


def start(llm: Any) -> Callable[[], list[int]]:
    """Starts a long request and waits for its first tokens; what is returned runs it to the end."""
    engine = llm.llm_engine
    engine.add_request("long", {"prompt_token_ids": LONG[0]}, sampling(LONG[1]))
    while not (outputs := engine.step()):
        pass

    def finish() -> list[int]:
        nonlocal outputs
        while engine.has_unfinished_requests():
            outputs = engine.step() or outputs
        return tokens_of(outputs[0])

    return finish


def rounds(llm: Any, **options: bool) -> list[Any]:
    return [[play(llm), llm.reset_prefix_cache(**options)] for _ in range(3)]


def busy(llm: Any) -> Facts:
    play(llm)
    finish = start(llm)
    before = llm.free_block_queue_stats()
    facts = {
        "before": before,
        "order": llm.reset_free_block_queue_order(),
        "cache and order": llm.reset_prefix_cache(reorder_free_queue=True),
        "after": llm.free_block_queue_stats(),
        "tokens": finish(),
    }
    alone = play(llm, [LONG])[0]
    return facts | {
        "tokens alone": alone,
        "done": llm.reset_free_block_queue_order(),
        "end": llm.free_block_queue_stats(),
    }


def asleep(llm: Any) -> Facts:
    expected = play(llm)
    shuffled = llm.free_block_queue_stats()
    llm.sleep(level=1)
    facts = {"shuffled": shuffled, "done": llm.reset_free_block_queue_order()}
    facts["stats"] = llm.free_block_queue_stats()
    llm.wake_up()
    return facts | {"equal": play(llm) == expected}


def second_thread(llm: Any) -> Facts:
    """Another thread asks again and again while this one steps."""
    (expected,) = play(llm, [LONG])
    finish = start(llm)
    over = threading.Event()
    answers: dict[str, int] = {}

    def ask() -> None:
        while not over.is_set():
            answer = str(outcome(llm.reset_free_block_queue_order))
            answers[answer] = answers.get(answer, 0) + 1
            time.sleep(0.001)  # or the engine would hardly get the interpreter

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        got = finish()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    return {
        "answers": answers,
        "equal": got == expected,
        "done": llm.reset_free_block_queue_order(),
        "stats": llm.free_block_queue_stats(),
    }


def llm_scenes(front_end: str, model: Path, scenes: Facts) -> None:
    if front_end == "multi_process":
        schedule_asynchronously()
    with tiny_engine(model, **POOL) as llm:
        scenes["scheduling"] = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        scenes["fresh"] = llm.free_block_queue_stats()
        scenes["rounds as ever"] = rounds(llm)
        llm.reset_prefix_cache(reorder_free_queue=True)
        scenes["rounds in order"] = rounds(llm, reorder_free_queue=True)
        scenes["busy"] = busy(llm)
        scenes["asleep"] = asleep(llm)
        if front_end == "in_process":
            scenes["second thread"] = second_thread(llm)
            core = llm.llm_engine.engine_core.engine_core
            queue = core.scheduler.kv_cache_manager.block_pool.free_block_queue
            scenes["check"] = queue.check() if hasattr(queue, "check") else ""
            scenes["figures of the cache"] = [
                dict(vars(core.scheduler.kv_cache_manager.prefix_cache_stats)),
                llm.reset_free_block_queue_order(),
                dict(vars(core.scheduler.kv_cache_manager.prefix_cache_stats)),
            ]
    scenes["after shutdown"] = [
        outcome(llm.reset_free_block_queue_order),
        outcome(llm.free_block_queue_stats),
        outcome(lambda: llm.reset_prefix_cache(reorder_free_queue=True)),
    ]


# An AsyncLLM, with one engine core or with two.


class Conversation:
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._number = count()

    async def generate(self, request: tuple[list[int], int], rank: int | None = None) -> list[int]:
        return tokens_of(await self.ask(request, rank))

    async def ask(
        self,
        request: tuple[list[int], int],
        rank: int | None = None,
        begun: asyncio.Event | None = None,
        request_id: str | None = None,
    ) -> Any:
        """All of the answer; ``begun`` is set when its first token is there."""
        prompt, output = request
        stream = self.llm.generate(
            {"prompt_token_ids": prompt},
            sampling(output),
            request_id=request_id or str(next(self._number)),
            data_parallel_rank=rank,
        )
        answer: Any = None
        async for answer in stream:  # noqa: B007
            if begun is not None:
                begun.set()
        return answer

    async def start(
        self, request: tuple[list[int], int] = LONG, rank: int | None = None
    ) -> asyncio.Task[Any]:
        begun = asyncio.Event()
        task = asyncio.create_task(self.ask(request, rank, begun))
        await begun.wait()
        return task

    async def play(self) -> list[list[int]]:
        return list(await asyncio.gather(*map(self.generate, ROUND)))


async def async_busy(talk: Conversation, rank: int | None) -> Facts:
    llm = talk.llm
    await talk.play()
    running = await talk.start(rank=rank)
    facts = {
        "before": await llm.free_block_queue_stats(),
        "order": await llm.reset_free_block_queue_order(),
        "cache and order": await llm.reset_prefix_cache(reorder_free_queue=True),
        "after": await llm.free_block_queue_stats(),
        "tokens": tokens_of(await running),
    }
    facts["tokens alone"] = await talk.generate(LONG, rank)
    facts["done"] = await llm.reset_free_block_queue_order()
    return facts | {"end": await llm.free_block_queue_stats()}


async def paused(talk: Conversation) -> Facts:
    llm = talk.llm
    expected = await talk.generate(LONG)
    running = await talk.start()
    await llm.pause_generation(mode="keep", clear_cache=False)
    facts = {"kept": await llm.reset_free_block_queue_order()}
    await llm.resume_generation()
    facts["equal"] = tokens_of(await running) == expected
    await talk.play()
    await llm.pause_generation(mode="wait", clear_cache=True)
    facts["drained"] = await llm.reset_free_block_queue_order()
    facts["stats"] = await llm.free_block_queue_stats()
    await llm.resume_generation()
    return facts


async def async_asleep(talk: Conversation) -> Facts:
    expected = await talk.play()
    await talk.llm.sleep(1)
    facts = {"done": await talk.llm.reset_free_block_queue_order()}
    facts["stats"] = await talk.llm.free_block_queue_stats()
    await talk.llm.wake_up()
    return facts | {"equal": await talk.play() == expected}


async def other_loop(llm: Any) -> Facts:
    """From another thread: in a loop of its own, and in that of the engine."""
    here = asyncio.get_running_loop()

    def ask() -> list[Any]:
        there = asyncio.run_coroutine_threadsafe(llm.reset_free_block_queue_order(), here)
        return [
            outcome(lambda: asyncio.run(llm.reset_free_block_queue_order())),
            there.result(timeout=60),
        ]

    wrong, right = await asyncio.to_thread(ask)
    return {"wrong": wrong, "right": right}


async def async_scenes(front_end: str, model: Path, scenes: Facts) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if front_end == "async":
        schedule_asynchronously()
    size = 2 if front_end == "data_parallel" else 1
    options = ENGINE_OPTIONS | POOL | {"data_parallel_size": size}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **options))
    try:
        talk = Conversation(llm)
        scenes["scheduling"] = llm.vllm_config.scheduler_config.async_scheduling
        scenes["fresh"] = await llm.free_block_queue_stats()
        scenes["busy"] = await async_busy(talk, size - 1 if size > 1 else None)
        scenes["asleep"] = await async_asleep(talk)
        scenes["other loop"] = await other_loop(llm)
        if size == 1:
            scenes["paused"] = await paused(talk)
    finally:
        llm.shutdown()
    scenes["after shutdown"] = [
        await outcome_of(llm.reset_free_block_queue_order),
        await outcome_of(llm.free_block_queue_stats),
        await outcome_of(lambda: llm.reset_prefix_cache(reorder_free_queue=True)),
    ]


# An engine core that was started before the variable was set.


def off_scenes(model: Path, scenes: Facts) -> None:
    from pyblockpool.plugin import entry

    with tiny_engine(model, **POOL) as llm:
        scenes["no plugin at all"] = hasattr(llm, "reset_free_block_queue_order")
        os.environ["VLLM_BLOCK_QUEUE"] = "native"
        entry.register()
        scenes["answers"] = [
            outcome(llm.reset_free_block_queue_order),
            outcome(llm.free_block_queue_stats),
            outcome(lambda: llm.reset_prefix_cache(reorder_free_queue=True)),
        ]
        scenes["as ever"] = [llm.reset_prefix_cache(), len(play(llm))]


def main(front_end: str, model: str, out: str) -> None:
    scenes: Facts = {"pid": os.getpid()}
    if front_end in ("async", "data_parallel"):
        asyncio.run(async_scenes(front_end, Path(model), scenes))
    elif front_end == "off":
        off_scenes(Path(model), scenes)
    else:
        llm_scenes(front_end, Path(model), scenes)
    Path(out).write_text(json.dumps(scenes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
