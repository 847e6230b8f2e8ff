"""All that can happen to a request's blocks, on a real engine in one process.

``python scenarios.py MODEL OUT.json``, with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``; it is run by
test_in_process.py. The pool has 47 free blocks of 32 tokens, a step computes at most 256 tokens,
and sampling is greedy: the tokens depend on nothing but what the KV cache holds.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tiny_llama import BLOCK_SIZE, tiny_engine

import pyblockpool


def tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(512) for _ in range(count)]


def state_of(pool: Any) -> dict[str, Any]:
    """What a pool has free, in which order, and what its queue says of itself."""
    queue = pool.free_block_queue
    return {
        "order": [block.block_id for block in queue.get_all_free_blocks()],
        "num_free_blocks": queue.num_free_blocks,
        "check": queue.check() if hasattr(queue, "check") else "",
    }


class Stage:
    """An engine whose steps are ours to take, and what came out of it."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self.scenes: dict[str, dict[str, Any]] = {}
        self.prefills: dict[str, float] = {}  # in seconds, as vLLM measures them
        self._number = 0

    def add(self, prompt: list[int], output: int) -> str:
        from vllm import SamplingParams

        self._number += 1
        limits = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        request: str = self.engine.add_request(
            str(self._number), {"prompt_token_ids": prompt}, limits
        )
        return request

    def steps(self, limit: int = 10_000) -> dict[str, Any]:
        """Steps until all is done, or so many times; what ended, by the number of its request."""
        ended = {}
        while limit and self.engine.has_unfinished_requests():
            limit -= 1
            for output in self.engine.step():
                if output.finished:
                    times = output.metrics
                    self.prefills[output.request_id] = times.first_token_ts - times.scheduled_ts
                    ended[output.request_id] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        "reason": output.outputs[0].finish_reason,
                    }
        return ended

    def scene(self, name: str, ended: dict[str, Any], **more: Any) -> None:
        """The end of a scenario: nothing runs any more."""
        self.scenes[name] = more | {"ended": ended} | state_of(self.pool)


def chunked_prefill(stage: Stage) -> None:
    stage.add(tokens(1, 700), output=20)
    stage.add(tokens(2, 500), output=40)
    stage.scene("chunked prefill", stage.steps())


def one_block_differs(stage: Stage) -> None:
    """Were these outputs equal, then equal tokens would say nothing about the KV cache."""
    prompt = tokens(3, 8 * BLOCK_SIZE + 1)
    stage.add(prompt, output=24)
    stage.add(
        prompt[: 2 * BLOCK_SIZE] + tokens(4, BLOCK_SIZE) + prompt[3 * BLOCK_SIZE :], output=24
    )
    stage.scene("one block differs", stage.steps())


def prefix_cache(stage: Stage) -> None:
    """Hits in running and in finished requests, the latter out of the middle of the queue."""
    shared = tokens(5, 10 * BLOCK_SIZE)
    stage.add(shared + tokens(6, 50), output=30)
    ended = stage.steps(limit=8)
    stage.add(shared + tokens(7, 90), output=8)
    ended |= stage.steps()
    stage.add(tokens(8, 600), output=5)
    stage.add(shared[: 6 * BLOCK_SIZE] + tokens(9, 40), output=33)
    stage.scene("prefix cache", ended | stage.steps())


def preemption(stage: Stage) -> None:
    """Six requests that need 66 of 47 blocks before they are done."""
    for seed in range(10, 16):
        stage.add(tokens(seed, 150), output=200)
    stage.scene("preemption", stage.steps())


def aborts(stage: Stage) -> None:
    """Aborted: one that decodes, one in the middle of its prefill, one that still waits."""
    requests = [stage.add(tokens(20, 100), output=60), stage.add(tokens(21, 64), output=70)]
    ended = stage.steps(limit=10)
    requests += [stage.add(tokens(seed, 900), output=9) for seed in (22, 23)]
    ended |= stage.steps(limit=2)
    # One by one: vLLM makes a set of them, and so frees their blocks in an order by chance.
    for request in (requests[0], *requests[2:]):
        stage.engine.abort_request([request], internal=True)
    stage.scene("aborts", ended | stage.steps())


def cache_reset(stage: Stage) -> None:
    """Refused while a request runs, done afterwards: the old prefix is not hit again."""
    prompt = tokens(30, 4 * BLOCK_SIZE + 3)
    stage.add(prompt, output=30)
    ended = stage.steps(limit=5)
    refused = not stage.engine.reset_prefix_cache()
    ended |= stage.steps()
    done = stage.engine.reset_prefix_cache()
    stage.add(prompt, output=30)
    stage.scene("cache reset", ended | stage.steps(), refused=refused, done=done)


SCENARIOS = [chunked_prefill, one_block_differs, prefix_cache, preemption, aborts, cache_reset]


def main(model: str, out: str) -> None:
    with tiny_engine(
        Path(model), max_model_len=1024, max_num_batched_tokens=256, num_gpu_blocks_override=48
    ) as llm:
        stage = Stage(llm)
        for scenario in SCENARIOS:
            scenario(stage)
        native = type(stage.pool.free_block_queue) is pyblockpool.FreeBlockQueue
    result = {
        "pid": os.getpid(),
        "native": native,
        "scenes": stage.scenes,
        "prefills": stage.prefills,
    }
    Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
