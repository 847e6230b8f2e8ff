"""A rollout server on AsyncLLM: agents come and go, a trainer ends rounds and changes weights.

    VLLM_BLOCK_QUEUE=native python examples/async_server.py --model Qwen/Qwen3-0.6B

With --data-parallel-size the reset reaches every engine, and its answer is that of all. All options
of vLLM's engines are understood.
"""

import asyncio
import random
import sys
from itertools import count
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

AGENTS, TURNS = 6, 3


class RolloutServer:
    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self._request_ids = map(str, count())

    async def generate(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        stream = self.engine.generate(
            {"prompt_token_ids": prompt}, sampling, next(self._request_ids)
        )
        *_, last = [answer async for answer in stream]
        return list(last.outputs[0].token_ids)

    async def end_round(self) -> bool:
        """Drain, change the weights, start anew: with an empty prefix cache and blocks in order.

        Returns whether the order is canonical; False if somebody still holds blocks.
        """
        await self.engine.pause_generation(mode="wait", clear_cache=False)
        await self.load_weights()
        # One call instead of `reset_prefix_cache()` alone; both happen in one go in each engine.
        in_order = await self.engine.reset_prefix_cache(reorder_free_queue=True)
        await self.engine.resume_generation()
        return bool(in_order)

    async def load_weights(self) -> None:
        """Yours: for example AsyncLLM.update_weights()."""


async def agent(server: RolloutServer, dice: random.Random, vocabulary: range) -> None:
    """A conversation in several turns, each on top of what was said before."""
    said = dice.choices(vocabulary, k=dice.randint(20, 150))
    for _ in range(TURNS):
        sampling = SamplingParams(max_tokens=dice.randint(5, 40), ignore_eos=True, detokenize=False)
        said += await server.generate(said, sampling)
        said += dice.choices(vocabulary, k=dice.randint(5, 30))


async def main() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(description=__doc__))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = AsyncEngineArgs.from_cli_args(arguments)  # vLLM has loaded its plugins by now
    if not hasattr(AsyncLLM, "reset_free_block_queue_order"):
        sys.exit("Start this with VLLM_BLOCK_QUEUE=native (or python) in the environment.")
    engine = AsyncLLM.from_engine_args(options)
    try:
        server = RolloutServer(engine)
        vocabulary = range(engine.model_config.get_vocab_size())
        for number in range(1, arguments.rounds + 1):
            agents = (agent(server, random.Random(seed), vocabulary) for seed in range(AGENTS))
            await asyncio.gather(*agents)
            used = await all_stats(engine)
            in_order = await server.end_round()
            now = await all_stats(engine)
            for rank, (before, after) in enumerate(zip(used, now, strict=True)):
                print(
                    f"round {number}, engine {rank}: {after['free']} free blocks in "
                    f"{before['runs']} runs of neighbours, after the reset in {after['runs']}"
                )
            print(f"round {number}: all engines in order: {in_order}")
    finally:
        engine.shutdown()


async def all_stats(engine: AsyncLLM) -> list[dict[str, Any]]:
    stats = await engine.free_block_queue_stats()
    return stats if isinstance(stats, list) else [stats]


if __name__ == "__main__":
    asyncio.run(main())
