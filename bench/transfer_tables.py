"""Where the block tables of a transfer come from: replays, a queue alone, traces of engines."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pyblockpool import FreeBlockQueue
from pyblockpool.block_trace import Request, read_sections
from pyblockpool.contiguity import Table
from pyblockpool.errors import ReplayError, TraceError
from pyblockpool.plugin import entry
from pyblockpool.plugin.placement import TILE_TOKENS
from pyblockpool.replay import Setup, _ClosedLoop, _refuse_what_does_not_fit, _Resident
from pyblockpool.request_trace import TraceRequest
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, Settings
from pyblockpool.trace_writer import PREEMPTED

HAS_VLLM = find_spec("vllm") is not None

# Values of VLLM_BLOCK_QUEUE, None for unset.
QUEUES = {
    "vLLM": None,
    "native": "native",
    "sorted": "native:sorted",
    "extent": "native:extent",
}


def made_requests(count: int, seed: int) -> list[TraceRequest]:
    """Requests with nothing in common: prompts of 800 tokens in the median, answers of 200."""
    dice = random.Random(seed)
    return [
        TraceRequest(
            input_length=min(max(32, round(dice.lognormvariate(6.7, 0.8))), 6_000),
            output_length=min(1 + round(dice.expovariate(1 / 200)), 1_000),
        )
        for _ in range(count)
    ]


def replayed_tables(
    queue: str | None, requests: Sequence[TraceRequest], setup: Setup
) -> list[Table]:
    """The tables of all prompts of a replay, through vLLM's KVCacheManager, in this process.

    A prompt keeps its blocks to the end, so they are read there.

    Args:
        queue: the value of VLLM_BLOCK_QUEUE, None for vLLM untouched.
        requests, setup: as of `pyblockpool.replay.replay`.

    Returns:
        in the order of the requests.
    """
    _refuse_what_does_not_fit(requests, setup)
    os.environ.pop(TRACE_VARIABLE, None)
    os.environ.pop(QUEUE_VARIABLE, None)
    if queue is not None:
        os.environ[QUEUE_VARIABLE] = queue
    entry.register()
    try:
        loop = _TableKeeper(requests, setup)
        loop.expect_queue(Settings.from_environ(os.environ))
        loop.run(lambda admitted: None)
        tables = loop.tables
        del loop  # its pool has to be gone before the plugin can be taken back
    finally:
        entry.restore()
        os.environ.pop(QUEUE_VARIABLE, None)
    return [tables[index] for index in range(len(requests))]


class _TableKeeper(_ClosedLoop):
    """A replay has figures of its tables, and does not keep them."""

    def __init__(self, requests: Sequence[TraceRequest], setup: Setup) -> None:
        super().__init__(requests, setup)
        self.tables: dict[int, Table] = {}

    def _record(self, resident: _Resident, outcome: str) -> Request:
        record = super()._record(resident, outcome)
        if outcome != PREEMPTED:
            self.tables[resident.index] = record.prompt_table(self._setup.block_size)
        return record


@dataclass(slots=True, eq=False)
class _Block:
    block_id: int
    prev_free_block: Any = None
    next_free_block: Any = None


@dataclass(eq=False)
class _Running:
    """A request, its blocks, and how many tokens of its answer there are."""

    index: int
    trace: TraceRequest
    blocks: list[_Block] = field(default_factory=list)
    computed: int = 0
    answered: int = 0


def tables_of_a_queue_alone(
    queue: str | None, requests: Sequence[TraceRequest], setup: Setup
) -> list[Table]:
    """The same without vLLM, for requests that share no prefix (those that do share none here).

    What vLLM's pool asks of its queue, and nothing else. Policy lru stands for vLLM's queue, whose
    order it has.

    Raises:
        ReplayError: the pool is too small; here nobody is preempted.
    """
    _refuse_what_does_not_fit(requests, setup)
    settings = Settings.from_environ({} if queue is None else {QUEUE_VARIABLE: queue})
    blocks = [_Block(block_id) for block_id in range(setup.num_blocks)]
    free = FreeBlockQueue(
        blocks,
        policy=settings.policy,
        size=settings.size or TILE_TOKENS // setup.block_size,
        pack_tails=settings.pack_tails,
    )
    free.popleft()  # the null block
    waiting = deque(_Running(index, request) for index, request in enumerate(requests))
    running: list[_Running] = []
    tables: dict[int, Table] = {}
    dice = random.Random(setup.seed)

    def allocate(request: _Running, tokens: int) -> None:
        missing = -(-(request.computed + tokens) // setup.block_size) - len(request.blocks)
        if missing > free.num_free_blocks:
            raise ReplayError(f"{setup.num_blocks} blocks are too few for {len(running)} requests")
        if missing > 0:
            free.grow_after(request.blocks[-1] if request.blocks else None)
            request.blocks += free.popleft_n(missing)
            free.grow_after(None)
        request.computed += tokens

    def advance(request: _Running) -> None:
        left = request.trace.input_length - request.computed
        if left > 0:
            allocate(request, left if setup.chunk is None else min(left, setup.chunk))
            request.answered = int(request.computed == request.trace.input_length)
        else:
            tokens = min(setup.block_size, request.trace.output_length - request.answered)
            allocate(request, tokens)
            request.answered += tokens
        if request.answered == request.trace.output_length:
            running.remove(request)
            prompt = request.blocks[: -(-request.trace.input_length // setup.block_size)]
            tables[request.index] = np.array([block.block_id for block in prompt], np.int32)
            full = request.computed // setup.block_size if setup.caching else 0
            free.prepend_n(request.blocks[full:][::-1])
            free.append_n(request.blocks[:full][::-1])

    while waiting or running:
        while waiting and len(running) < setup.residents:
            blocks_of_prompt = -(-waiting[0].trace.input_length // setup.block_size)
            if blocks_of_prompt > free.num_free_blocks:
                break
            running.append(waiting.popleft())
            advance(running[-1])
        for request in dice.sample(running, len(running)):
            advance(request)
    return [tables[index] for index in range(len(requests))]


def recorded_tables(path: Path) -> list[Table]:
    """The tables of the prompts in a block trace, without null blocks.

    Raises:
        TraceError: it is no block trace, or has no table.
    """
    tables = []
    for section in read_sections(path):
        for record in section.records():
            if isinstance(record, Request) and record.leads and record.outcome != PREEMPTED:
                group = section.header.groups[record.group]
                table = record.prompt_table(group.block_size)
                tables.append(table[table > 0])
    tables = [table for table in tables if len(table)]
    if not tables:
        raise TraceError(f"{path}: no block table of a request that has ended")
    return tables
