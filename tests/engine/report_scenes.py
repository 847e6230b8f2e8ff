"""Rounds of requests with a reset between them, whose block tables the engine core records.

``python report_scenes.py MODEL OUT.json RESET``, under VLLM_BLOCK_TRACE; it is run by
test_report.py. RESET: ``cache`` resets the prefix cache after each round, ``order`` the order of
the free blocks, too.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from reset_scenes import play
from scenarios import tokens
from tiny_llama import BLOCK_SIZE, tiny_engine

ROUNDS, REQUESTS = 6, 8


def requests_of(number: int) -> list[tuple[list[int], int]]:
    """Of many lengths, so that they end out of order."""
    dice = random.Random(number)
    return [
        (
            tokens(100 * number + index, dice.randint(2 * BLOCK_SIZE, 12 * BLOCK_SIZE)),
            dice.randint(5, 4 * BLOCK_SIZE),
        )
        for index in range(REQUESTS)
    ]


def main(model: str, out: str, reset: str) -> None:
    options = {"max_model_len": 1024, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 241}
    with tiny_engine(Path(model), **options) as llm:
        played = []
        for number in range(ROUNDS):
            played.append(play(llm, requests_of(number)))
            extra = {"reorder_free_queue": True} if reset == "order" else {}
            assert llm.reset_prefix_cache(**extra)
    Path(out).write_text(json.dumps(played), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
