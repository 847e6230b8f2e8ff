"""What the plugin does on the vLLM that is imported here: its verdict, and lives of a real cache.

    python tests/compat/compat_scene.py MODEL_FOLDER RESULT_FILE

In a process of its own, with the sources of a release in front on PYTHONPATH.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pools import give_hash
from scheduler_alone import BLOCK_SIZE, full_attention, make_request, make_scheduler, schedule

from pyblockpool import FreeBlockQueue
from pyblockpool.errors import BlockQueueError
from pyblockpool.plugin import entry
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE

VALUES = ("python", "native", "native:sorted", "native:extent")
TRACE = "trace"
NUM_BLOCKS = 48
STEPS = 160
OFFLOAD = "vllm.v1.simple_kv_offload.manager"


@contextmanager
def switched_on(variables: dict[str, str]) -> Iterator[None]:
    """The plugin under these variables; none is vLLM as it is."""
    os.environ.update(variables)
    try:
        entry.register()
        yield
    finally:
        for name in variables:
            del os.environ[name]
        gc.collect()
        entry.restore()


def verdict(variables: dict[str, str]) -> str:
    """Why it is refused; "" if it is not."""
    try:
        with switched_on(variables):
            return ""
    except BlockQueueError as error:
        return str(error)


def life(model: Path, watch: Callable[[Any], None]) -> dict[str, Any]:
    """Requests come, share prefixes, are preempted, aborted and end, in a pool that is too small.

    Args:
        watch: called with the pool after each step.

    Returns:
        ``rounds``: two of them, each all that can be seen: the tables after each step, what the
        resets said, the order that is left. ``hits``: tokens found in the prefix cache.
        ``preemptions``: requests that lost their blocks.
    """
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler(model, num_blocks=NUM_BLOCKS)
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    chance = random.Random(40244)
    system = [chance.randrange(512) for _ in range(8 * BLOCK_SIZE)]
    rounds, requests = [], []
    hits = 0

    def step() -> None:
        nonlocal hits
        scheduled, output = schedule(scheduler)
        hits += sum(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
        scheduler.update_from_output(scheduled, output)
        watch(pool)

    for number in range(2):
        seen: list[Any] = []
        for at in range(STEPS):
            if chance.random() < 0.2:
                own = [chance.randrange(512) for _ in range(chance.randint(1, 60))]
                prompt = system[: chance.randint(0, len(system))] + own
                request = make_request(f"{number}-{at}", prompt, chance.randint(1, 80))
                requests.append(request)
                scheduler.add_request(request)
            if at % 40 == 39 and scheduler.running:
                gone = scheduler.running[-1].request_id
                scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            step()
            running = [request.request_id for request in scheduler.running]
            seen.append([[name, manager.get_block_ids(name)] for name in running])
            seen.append(pool.get_num_free_blocks())
        seen.append(scheduler.reset_prefix_cache())  # while requests run: refused
        while scheduler.requests:
            step()
        seen.append(scheduler.reset_prefix_cache())
        assert seen[-2:] == [False, True], seen[-2:]
        assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
        seen.append([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])
        rounds.append(seen)
        if hasattr(scheduler, "reset_free_block_queue_order"):
            assert scheduler.reset_free_block_queue_order(), "the order reset says no"
            watch(pool)
    return {
        "rounds": rounds,
        "hits": hits,
        "preemptions": sum(request.num_preemptions for request in requests),
        "last": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
    }


def keep_whole(pool: Any, value: str = "") -> None:
    """The queue is the one that this value asks for ("": vLLM's), and nothing in it is broken."""
    queue = pool.free_block_queue
    is_ours = type(queue) is FreeBlockQueue
    assert is_ours == value.startswith("native"), f"under {value!r} a {type(queue)}"
    check: Callable[[], str] = getattr(queue, "check", str)
    broken = check()
    assert not broken, broken
    free = queue.get_all_free_blocks()
    assert queue.num_free_blocks == len(free) == len({block.block_id for block in free})
    assert all(block.ref_cnt == 0 for block in free)


def compare_lives(model: Path, values: list[str]) -> dict[str, str]:
    """For each value what is wrong with a life under it, "" if nothing is.

    Under ``lru`` the block ids have to be those of vLLM's queue: in the first round of vLLM as it
    is, in the second, after an order reset, of vLLM's queue with that.
    """
    stock = life(model, keep_whole)
    for what in ("hits", "preemptions"):
        assert stock[what], f"a life without {what} shows nothing"
    found, lives = {}, {}
    for value in values:
        try:
            with switched_on({QUEUE_VARIABLE: value}):
                lives[value] = life(model, partial(keep_whole, value=value))
        except Exception as error:  # whatever vLLM raises with our queue is a finding
            found[value] = f"{type(error).__name__}: {error}"
            continue
        found[value] = ""
        ordered = list(range(1, NUM_BLOCKS))
        if value in ("python", "native"):
            if lives[value]["rounds"][0] != stock["rounds"][0]:
                found[value] = "other blocks than with vLLM's queue"
            elif "python" not in lives:
                found[value] = "no life under python to compare an order reset with"
            elif lives[value] != lives["python"]:
                found[value] = "other blocks than with vLLM's queue after an order reset"
        if value != "native:extent" and lives[value]["last"] != ordered:
            found[value] = f"an order reset left {lives[value]['last']}"
    return found


def lazy_walk(model: Path, watch: Callable[[Any], None]) -> list[Any]:
    """vLLM's own lazy CPU offload walks the free queue of a pool whose blocks come and go.

    Args:
        watch: called with the pool after each step.
    """
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    spec = full_attention()
    blocks = 48
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both"
        ),
    )
    size = spec.page_size_bytes * blocks
    if "shared_by" in inspect.signature(KVCacheTensor).parameters:
        tensor = KVCacheTensor(size=size, shared_by=["layer"])
    else:  # since 0.33
        strides = {"layer_stride": size, "block_stride": spec.page_size_bytes}
        tensor = KVCacheTensor(size=size, layers=["layer"], **strides)
    known = inspect.signature(SimpleCPUOffloadScheduler.__init__).parameters
    more = {"scheduler_block_size": BLOCK_SIZE, "hash_block_size": BLOCK_SIZE}
    offload = SimpleCPUOffloadScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[tensor],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        cpu_capacity_bytes=spec.page_size_bytes * 600,
        lazy_offload=True,
        **{name: more[name] for name in more if name in known},
    )
    pool = BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)
    offload.bind_gpu_block_pool(pool)
    offload._target_free = 6
    chance = random.Random(1)
    resident: list[list[Any]] = []
    stored: list[list[Any]] = []
    seen: list[Any] = []
    for at in range(200):
        what = chance.random()
        n = chance.randint(1, 8)
        if what < 0.5 and n <= pool.get_num_free_blocks():
            taken = pool.get_new_blocks(n)
            for block in taken[: chance.randint(0, n)]:
                give_hash(pool, block, 100 * at + block.block_id)
            resident.append(taken)
        elif resident:
            pool.free_blocks(reversed(resident.pop(chance.randrange(len(resident)))))
        gpu_ids, cpu_ids, *_ = offload._prepare_lazy_store_specs()
        cursor = offload._cursor
        seen.append([list(gpu_ids), list(cpu_ids), cursor and cursor.block_id])
        if gpu_ids:
            stored.append([pool.blocks[block_id] for block_id in gpu_ids])
        if stored and chance.random() < 0.6:  # the copies are made: the blocks are given back
            pool.free_blocks(stored.pop(0))
        watch(pool)
    assert sum(len(gpu_ids) for gpu_ids, _, _ in seen) > 20, seen
    return seen


def compare_walks(model: Path, value: str) -> str | None:
    """What is wrong with the walk under this value; None where this vLLM has no such offload."""
    if find_spec("vllm.v1.simple_kv_offload") is None:
        return None
    stock = lazy_walk(model, keep_whole)
    try:
        with switched_on({QUEUE_VARIABLE: value}):
            ours = lazy_walk(model, partial(keep_whole, value=value))
    except Exception as error:  # whatever vLLM raises with our queue is a finding
        return f"{type(error).__name__}: {error}"
    return "" if ours == stock else "other blocks are offloaded than with vLLM's queue"


def main(model: Path, result: Path) -> None:
    """What is known is written as soon as it is: a scene that breaks keeps what came before."""
    import vllm

    told: dict[str, Any] = {"vllm": vllm.__version__, "file": vllm.__file__}

    def tell(name: str, finding: Any) -> None:
        told[name] = finding
        new = result.with_suffix(".new")
        new.write_text(json.dumps(told, indent=2), encoding="utf-8")
        new.replace(result)

    verdicts = {value: verdict({QUEUE_VARIABLE: value}) for value in VALUES}
    verdicts[TRACE] = verdict({TRACE_VARIABLE: str(result.with_suffix(".trace"))})
    tell("verdicts", verdicts)
    works = [value for value in VALUES if not verdicts[value]]
    tell("lives", compare_lives(model, works) if works else {})
    tell("walk", compare_walks(model, "native") if "native" in works else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
