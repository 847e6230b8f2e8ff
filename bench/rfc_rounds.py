"""Rounds like those of RFC vllm-project/vllm#40244, as a request trace in the GRPO format."""

from __future__ import annotations

import json
import random
from pathlib import Path

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 2_530
ANSWER_TOKENS = (1_600, 2_600)


def write_rfc_rounds(path: Path, rounds: int = 8, prompts: int = 2, samples: int = 4) -> None:
    """Two long prompts with four samples each; the prefix cache is reset between rounds."""
    chance = random.Random(40244)
    with path.open("w") as file:
        for number in range(rounds):
            for prompt in range(prompts):
                for _ in range(samples):
                    request = {
                        "step": number,
                        "in": PROMPT_BLOCKS * BLOCK_TOKENS,
                        "out": chance.randint(*ANSWER_TOKENS),
                        "hash_ids": list(
                            range(prompt * PROMPT_BLOCKS, (prompt + 1) * PROMPT_BLOCKS)
                        ),
                    }
                    file.write(json.dumps(request) + "\n")
