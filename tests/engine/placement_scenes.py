"""Rounds of requests in an engine core of its own, with asynchronous scheduling.

``python placement_scenes.py MODEL OUT.json``; it is run by test_placement.py. No round is followed
by a reset: the pool fills with cached blocks. Some requests share a prefix, and all decode past the
end of several blocks.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from reset_scenes import play, schedule_asynchronously
from scenarios import tokens
from tiny_llama import BLOCK_SIZE, tiny_engine

ROUNDS, REQUESTS = 6, 10


def requests_of(number: int) -> list[tuple[list[int], int]]:
    dice = random.Random(number)
    shared = tokens(1000, 5 * BLOCK_SIZE)
    requests = []
    for index in range(REQUESTS):
        prompt = tokens(100 * number + index, dice.randint(20, 12 * BLOCK_SIZE))
        if index % 3 == 0:
            prompt = shared[: dice.randint(1, 5) * BLOCK_SIZE] + prompt
        requests.append((prompt, dice.randint(5, 5 * BLOCK_SIZE)))
    return requests


def main(model: str, out: str) -> None:
    schedule_asynchronously()
    with tiny_engine(
        Path(model), max_model_len=1024, max_num_batched_tokens=512, num_gpu_blocks_override=241
    ) as llm:
        result: dict[str, Any] = {
            "scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
            "tokens": [play(llm, requests_of(number)) for number in range(ROUNDS)],
        }
        if hasattr(llm, "free_block_queue_stats"):
            result["stats"] = llm.free_block_queue_stats()
            result["reset"] = llm.reset_prefix_cache()
            result["after"] = llm.free_block_queue_stats()
    Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
