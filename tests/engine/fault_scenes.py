"""Faults in the middle of a run, on engines of many kinds in one process.

``python fault_scenes.py LLAMA SLIDING_LLAMA OUT.json``, with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``;
it is run by test_faults.py. The pools have a few dozen blocks of 32 tokens, a step computes at most
256 tokens, and sampling is greedy: the tokens depend on nothing but what the KV cache holds.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from reset_scenes import outcome, schedule_asynchronously
from scenarios import Stage, state_of, tokens
from tiny_llama import BLOCK_SIZE, tiny_engine

import pyblockpool

LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 25}
# For a model that needs blocks of four groups for each token.
ROOMY = LIMITS | {"num_gpu_blocks_override": 57}
REQUESTS = 8


def offload(*, lazy: bool) -> dict[str, Any]:
    """In host memory, as many blocks as the requests of a scene need, and a few more."""
    from vllm.config import KVTransferConfig

    extra = {"cpu_bytes_to_use": 96 * (1 << 15), "lazy_offload": lazy}
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
    }


def ngram() -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }
    }


def requests() -> list[tuple[list[int], int]]:
    """Prompts that repeat themselves, for n-grams to find; every third begins like another."""
    dice = random.Random(0)
    shared = tokens(1000, 3 * BLOCK_SIZE)
    made = []
    for index in range(REQUESTS):
        prompt = tokens(index, dice.randint(20, 70)) * 2
        made.append((shared * (index % 3 == 0) + prompt, dice.randint(40, 100)))
    return made


class FaultStage(Stage):
    """A stage that remembers the requests of the scene, as the scheduler knows them.

    Attributes:
        requests: by the number that their outputs bear.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.requests: dict[str, Any] = {}

    def enter(self) -> list[str]:
        """All requests at once; their ids."""
        self.requests = {}
        return [self.enter_one(*request) for request in requests()]

    def enter_one(self, prompt: list[int], output: int) -> str:
        request_id = self.add(prompt, output)
        self.requests[str(self._number)] = self.scheduler.requests[request_id]
        return request_id

    def leave(self, name: str, ended: dict[str, Any], **facts: Any) -> None:
        """The end of a scene: nothing runs any more, nor is anything copied."""
        for _ in range(100):
            if not self.scheduler.has_requests() and not self.core.batch_queue:
                break
            self.engine.step()
        else:
            raise RuntimeError(f"{name}: the engine does not come to rest")
        pools = [self.pool]
        if self.scheduler.connector is not None:
            pools.append(self.scheduler.connector.scheduler_manager.cpu_block_pool)
        ends = [ended.get(number) for number in self.requests]
        self.scenes[name] = facts | {
            "tokens": [end and end["tokens"] for end in ends],
            "cached": [end and end["cached"] for end in ends],
            "statuses": [each.status.name for each in self.requests.values()],
            "preemptions": sum(each.num_preemptions for each in self.requests.values()),
            "pools": [
                state_of(pool)
                | {
                    "native": type(pool.free_block_queue) is pyblockpool.FreeBlockQueue,
                    "num_blocks": pool.num_gpu_blocks,
                    "in_use": sum(b.ref_cnt > 0 and not b.is_null for b in pool.blocks),
                }
                for pool in pools
            ],
        }


def calm(stage: FaultStage) -> None:
    stage.requests = {}
    ended: dict[str, Any] = {}
    for request in requests():
        stage.enter_one(*request)
        ended |= stage.steps()
    stage.leave("calm", ended)


def storm(stage: FaultStage) -> None:
    """More than the pool holds, and each of them grows."""
    stage.enter()
    stage.leave("storm", stage.steps())


def aborts(stage: FaultStage) -> None:
    """Every second request, whether it runs or waits."""
    names = stage.enter()
    ended = stage.steps(limit=30)
    running = len(stage.scheduler.running)
    # One by one: vLLM makes a set of them, and so frees their blocks in an order by chance.
    for name in names[::2]:
        stage.engine.abort_request([name], internal=True)
    stage.leave("aborts", ended | stage.steps(), running=running)


def reset(stage: FaultStage) -> None:
    stage.enter()
    ended = stage.steps(limit=30)
    running = len(stage.scheduler.running)
    done = outcome(lambda: stage.engine.reset_prefix_cache(reset_running_requests=True))
    stage.leave("reset", ended | stage.steps(), running=running, done=done)


def sleep(stage: FaultStage) -> None:
    """Its level gives up what is cached; the requests are kept."""
    stage.enter()
    ended = stage.steps(limit=30)
    running = len(stage.scheduler.running)
    done = outcome(lambda: stage.engine.sleep(level=1, mode="keep"))
    asleep = len(stage.engine.step())
    stage.engine.wake_up()
    stage.leave("sleep", ended | stage.steps(), running=running, done=done, asleep=asleep)


SCENES = [calm, storm, aborts, reset, sleep]


@contextmanager
def scheduling(*, asynchronous: bool) -> Iterator[None]:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config
    with mock.patch.object(CpuPlatform, "check_and_update_config", check):
        if asynchronous:
            schedule_asynchronously()
        yield


def play(model: str, options: dict[str, Any]) -> dict[str, Any]:
    with tiny_engine(Path(model), **options) as llm:
        stage = FaultStage(llm)
        for scene in SCENES:
            scene(stage)
        groups = stage.scheduler.kv_cache_config.kv_cache_groups
        return {
            "scheduling": stage.engine.vllm_config.scheduler_config.async_scheduling,
            "groups": [type(group.kv_cache_spec).__name__ for group in groups],
            "counters": {
                each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")
            },
            "scenes": stage.scenes,
        }


def main(model: str, sliding: str, out: str) -> None:
    from host_offload import HostCopyBackend, install

    install()
    engines: dict[str, tuple[str, dict[str, Any]]] = {
        "prefix caching": (model, LIMITS),
        "no prefix caching": (model, LIMITS | {"enable_prefix_caching": False}),
        "sliding windows": (sliding, ROOMY),
        "eager offload": (model, LIMITS | offload(lazy=False)),
        "lazy offload": (model, LIMITS | offload(lazy=True)),
        "asynchronous": (model, LIMITS),
        # The last one: once Numba is there, vLLM 0.32 starts no further CPU engine in a process.
        "n-gram": (model, LIMITS | ngram()),
    }
    plays = {}
    for name, (path, options) in engines.items():
        HostCopyBackend.stored = HostCopyBackend.loaded = 0
        with scheduling(asynchronous=name == "asynchronous"):
            plays[name] = play(path, options)
        plays[name] |= {"stored": HostCopyBackend.stored, "loaded": HostCopyBackend.loaded}
    Path(out).write_text(json.dumps(plays), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
