"""Rollout rounds of a trainer that shares its device with vLLM, in canonical block order each time.

    export VLLM_BLOCK_QUEUE=native
    python examples/rollout_loop.py --model Qwen/Qwen3-0.6B --enable-sleep-mode

Between two rounds the engine sleeps while the trainer works (only a GPU can: leave the flag out
elsewhere). vLLM forgets its prefix cache then, but not the order in which blocks came back; one
call repairs that. All options of vLLM's engines are understood.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS, SAMPLES = 4, 4


def train(llm: LLM, samples: Sequence[Any]) -> None:
    """Yours: rewards, a step of the optimizer, new weights for the engine."""


def main() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = EngineArgs.from_cli_args(arguments)  # vLLM has loaded its plugins by now
    if not hasattr(LLM, "reset_free_block_queue_order"):
        sys.exit("Start this with VLLM_BLOCK_QUEUE=native (or python) in the environment.")
    llm = LLM.from_engine_args(options)

    dice = random.Random(0)
    tokens = range(llm.llm_engine.model_config.get_vocab_size())
    prompts = [
        {"prompt_token_ids": dice.choices(tokens, k=dice.randint(50, 300))} for _ in range(PROMPTS)
    ]
    for number in range(1, arguments.rounds + 1):
        sampling = SamplingParams(n=SAMPLES, max_tokens=64, seed=number, detokenize=False)
        samples = llm.generate(prompts, sampling, use_tqdm=False)
        used = llm.free_block_queue_stats()

        llm.sleep(level=1)  # resets the prefix cache
        # The one line that matters. False means that somebody still holds blocks: nothing was
        # changed, and the next round starts in the order that there is.
        in_order = llm.reset_free_block_queue_order()
        train(llm, samples)
        llm.wake_up()

        now = llm.free_block_queue_stats()
        print(
            f"round {number}: {now['free']} free blocks in {used['runs']} runs of neighbours, "
            f"after the reset in {now['runs']}; in order: {in_order}"
        )
    llm.llm_engine.engine_core.shutdown()  # at once, not some time while the interpreter ends


if __name__ == "__main__":
    main()
