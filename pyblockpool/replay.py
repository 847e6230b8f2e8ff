"""A request trace through vLLM's real KVCacheManager and BlockPool, without a model.

The requests are vLLM's own, with real tokens and real block hashes: admission, prefix lookup,
caching, growth and release are vLLM's. Only the scheduler is ours, a closed loop that keeps up to R
requests resident: who ends makes room for the next one of the trace. In each turn each resident
request, in shuffled order, gets slots for a chunk of its prompt, or for as many tokens of its
answer as a block holds. When there are no blocks for that, the request that was admitted last is
preempted, as by vLLM's scheduler.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

import pyblockpool
from pyblockpool.block_trace import Group, Header, Request
from pyblockpool.contiguity import Contiguity, Table
from pyblockpool.errors import BlockQueueError, ReplayError, UnsupportedVLLMError
from pyblockpool.report import TILE_TOKENS, EngineFigures, contiguity_as_json, or_none
from pyblockpool.request_trace import TraceRequest
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, Settings
from pyblockpool.trace_writer import PREEMPTED


@dataclass(frozen=True)
class Setup:
    """The engine that is played.

    Attributes:
        num_blocks: in the pool, the null block included.
        residents: requests that may run at the same time.
        block_size: tokens in a block.
        caching: whether prefixes are cached.
        chunk: tokens of a prompt that are computed in one turn, None for all of them.
        seed: of the order in which resident requests get their turn.
        tile: blocks in a tile, for which amplification is told; 0 for as many as hold 128 tokens.
        rounds: stretches with as many requests each, for which figures are told; None for the
            rounds of the trace.

    Raises:
        ValueError: a number that is too small.
    """

    num_blocks: int
    residents: int
    block_size: int = 16
    caching: bool = True
    chunk: int | None = None
    seed: int = 0
    tile: int = 0
    rounds: int | None = None

    def __post_init__(self) -> None:
        least_values = {
            "num_blocks": 2,
            "residents": 1,
            "block_size": 1,
            "chunk": 1,
            "tile": 0,
            "rounds": 1,
        }
        for name, least in least_values.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.tile == 0:
            object.__setattr__(self, "tile", max(1, TILE_TOKENS // self.block_size))


@dataclass
class Figures:
    """What a replay has shown.

    Attributes:
        prefill: the tables of prompts as soon as they are computed, second half of the requests.
        release: whole tables when their requests end, all requests.
        prompt_tokens, hit_tokens: of all prompts; those of them that were found in the cache. What
            a preempted request finds again does not count.
        evictions: cached blocks that were given to somebody else.
        preemptions: requests that lost their blocks and had to start again.
        queue: ``stats()`` of a native queue at the end, {} of vLLM's own.
        engine: the same tables as a report of an engine shows them, round by round; its tables are
            those of ``release`` and those that preempted requests lost.
    """

    prefill: Contiguity
    release: Contiguity
    engine: EngineFigures = field(compare=False)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    queue: dict[str, Any] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else math.nan

    def as_json(self) -> dict[str, Any]:
        """All of it, and the ratios, with plain names and values; None for what there is not."""
        engine = self.engine.as_json(regions=1)
        return {
            "hit_rate": or_none(self.hit_rate),
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "evictions": self.evictions,
            "preemptions": self.preemptions,
            "prefill": contiguity_as_json(self.prefill),
            "release": contiguity_as_json(self.release),
            "queue": self.queue,
            "rounds": engine["rounds"],
            "all": engine["all"],
        }


def replay(
    requests: Sequence[TraceRequest],
    setup: Setup,
    progress: Callable[[int], None] = lambda admitted: None,
) -> Figures:
    """Replay a trace in this process, with the queue that vLLM has here.

    Args:
        requests: in the order of the trace.
        setup: the engine.
        progress: called with the number of requests that were admitted so far.

    Raises:
        ReplayError: a request does not fit into the empty pool.
        UnsupportedVLLMError: the installed vLLM is older than 0.23.
        ImportError: vLLM is not installed.
    """
    _refuse_what_does_not_fit(requests, setup)
    return _ClosedLoop(requests, setup).run(progress)


def replay_each(
    requests: Sequence[TraceRequest],
    setup: Setup,
    queues: Sequence[str],
    *,
    workers: int = 1,
    progress: Callable[[str, int], None] = lambda queue, admitted: None,
) -> dict[str, Figures]:
    """Replay a trace with several queues, each in a process of its own, as an engine has it.

    Call it from a script only under ``if __name__ == "__main__"``: the processes are spawned.

    Args:
        requests: in the order of the trace.
        setup: the engine.
        queues: values of VLLM_BLOCK_QUEUE, each once.
        workers: processes at a time.
        progress: called with the queue and the number of requests that were admitted so far.

    Raises:
        SettingsError: a value of the variable that is not allowed.
        ReplayError: a request does not fit into the empty pool, or a process has failed.
        UnsupportedVLLMError: the installed vLLM is older than 0.23, or cannot do what a value of
            the variable asks for.
        ConflictError: somebody else has replaced what the plugin would replace.
        ImportError: vLLM is not installed.
    """
    for queue in queues:
        Settings.from_environ({QUEUE_VARIABLE: queue})
    _refuse_what_does_not_fit(requests, setup)
    figures: dict[str, Figures] = {}
    waiting = deque(dict.fromkeys(queues))
    running: dict[Connection, tuple[str, Any]] = {}
    spawn = multiprocessing.get_context("spawn")
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                ours, theirs = spawn.Pipe(duplex=False)
                queue = waiting.popleft()
                process = spawn.Process(
                    target=_replay_in_child, args=(theirs, queue, requests, setup), daemon=True
                )
                process.start()
                theirs.close()  # so that the end of the process is seen at our end
                running[ours] = (queue, process)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                queue, process = running[connection]
                try:
                    news = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    raise ReplayError(
                        f"the replay with {queue} ended with exit status {process.exitcode} "
                        "(-9: killed, perhaps for want of memory); what it printed may say why"
                    ) from None
                if isinstance(news, int):
                    progress(queue, news)
                    continue
                process.join()
                del running[connection]
                if isinstance(news, BaseException):
                    raise news
                figures[queue] = news
    finally:
        for connection, (_, process) in running.items():
            process.terminate()
            process.join()
            connection.close()
    return {queue: figures[queue] for queue in queues}


def _replay_in_child(
    connection: Connection, queue: str, requests: Sequence[TraceRequest], setup: Setup
) -> None:
    """Send the number of admitted requests again and again, then the figures or the error."""
    os.environ[QUEUE_VARIABLE] = queue
    os.environ.pop(TRACE_VARIABLE, None)  # a trace tells of engines
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        loop = _ClosedLoop(requests, setup)
        loop.expect_queue(Settings.from_environ(os.environ))
        connection.send(loop.run(connection.send))
    except (BlockQueueError, ImportError) as error:
        connection.send(error)


class _EvictionCount:
    """Stands where vLLM has its collector of metrics, and counts the cached blocks it loses."""

    def __init__(self) -> None:
        self.count = 0

    def on_block_evicted(self, block: Any) -> None:
        """Called for each block that is given to somebody, before it loses its hash."""
        self.count += block.block_hash is not None

    def on_block_allocated(self, block: Any) -> None:
        pass

    def on_block_accessed(self, block: Any) -> None:
        pass

    def reset(self) -> None:
        pass


@dataclass(eq=False)
class _Resident:
    """A request of the trace, from the moment in which it is the next one to be admitted."""

    index: int
    trace: TraceRequest
    request: Any
    was_admitted: bool = False
    hit_tokens: int = 0


class _ClosedLoop:
    def __init__(self, requests: Sequence[TraceRequest], setup: Setup) -> None:
        self._setup = setup
        self._evictions = _EvictionCount()
        self._manager = _make_manager(requests, setup, self._evictions)
        self._make_request = _request_maker(setup)
        self._trace = deque(enumerate(requests))
        self._second_half = len(requests) // 2
        self._round = requests[0].round if requests else 0
        # Who is admitted next: those that were preempted, then one of the trace.
        self._next: deque[_Resident] = deque()
        # The longest resident first.
        self._running: list[_Resident] = []
        self._random = random.Random(setup.seed)
        self._num_unique_tokens = 0
        self._figures = Figures(
            Contiguity(setup.tile), Contiguity(setup.tile), self._engine(len(requests))
        )

    def _engine(self, num_requests: int) -> EngineFigures:
        import vllm

        queue = self._manager.block_pool.free_block_queue
        stats: dict[str, Any] = queue.stats() if hasattr(queue, "stats") else {"policy": "lru"}
        asked_for = os.environ.get(QUEUE_VARIABLE)
        header = Header(
            pyblockpool=pyblockpool.__version__,
            vllm=vllm.__version__,
            queue=asked_for,
            policy=stats["policy"],
            implementation="native" if hasattr(queue, "stats") else "vllm",
            extent=stats.get("size"),
            model=None,
            attention=None,
            pid=os.getpid(),
            dp_rank=None,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            num_blocks=self._setup.num_blocks,
            caching=self._setup.caching,
            groups=(Group(self._setup.block_size, "FullAttentionSpec", 1),),
        )
        return EngineFigures(
            asked_for or "vLLM's queue",
            header,
            tile_tokens=self._setup.tile * self._setup.block_size,
            requests=num_requests,
            stretches=self._setup.rounds or 0,
        )

    def expect_queue(self, settings: Settings) -> None:
        queue = self._manager.block_pool.free_block_queue
        is_ours = type(queue).__module__.startswith("pyblockpool.")
        policy = queue.stats()["policy"] if is_ours else None
        if policy != (settings.policy if settings.queue == "native" else None):
            raise ReplayError(
                f"{QUEUE_VARIABLE}={settings} has no effect here, the queue is a "
                f"{type(queue).__name__}: VLLM_PLUGINS, where it is set, has to name pyblockpool"
            )

    def run(self, progress: Callable[[int], None]) -> Figures:
        admitted = 0
        while self._upcoming() or self._running:
            while resident := self._admit_next():
                if not resident.was_admitted:
                    resident.was_admitted = True
                    admitted += 1
                    progress(admitted)
            for resident in self._random.sample(self._running, len(self._running)):
                if resident in self._running:  # others of this turn may have preempted it
                    self._advance(resident)
        self._figures.evictions = self._evictions.count
        queue = self._manager.block_pool.free_block_queue
        if hasattr(queue, "stats"):
            self._figures.queue = queue.stats()
        return self._figures

    def _upcoming(self) -> _Resident | None:
        if not self._next and self._trace:
            index, trace = self._trace.popleft()
            tokens = list(chain.from_iterable(trace.prefix))
            tokens += self._unique_tokens(trace.input_length - len(tokens))
            request = self._make_request(str(index), tokens, trace.output_length)
            self._next.append(_Resident(index, trace, request))
        return self._next[0] if self._next else None

    def _unique_tokens(self, count: int) -> list[int]:
        """Tokens that no trace and no other call has: ids below 0."""
        first = self._num_unique_tokens + 1
        self._num_unique_tokens += count
        return [-token for token in range(first, first + count)]

    def _admit_next(self) -> _Resident | None:
        """The one that was admitted, None if nobody can be now."""
        resident = self._upcoming()
        if resident is None or len(self._running) == self._setup.residents:
            return None
        if resident.trace.round != self._round:
            if self._running:
                return None
            if not self._manager.reset_prefix_cache():
                raise ReplayError("the prefix cache cannot be reset: blocks are in use")
            self._round = resident.trace.round
            if self._setup.rounds is None:
                self._figures.engine.end_round()
        session = resident.trace.session
        if session is not None and any(other.trace.session == session for other in self._running):
            return None
        request = resident.request
        hit_blocks, num_hit, *_ = self._manager.get_computed_blocks(request)
        num_new = self._chunk(request.num_tokens - num_hit)
        if (
            self._manager.allocate_slots(
                request, num_new, num_hit, hit_blocks, full_sequence_must_fit=True
            )
            is None
        ):
            return None
        if not resident.was_admitted:
            resident.hit_tokens = num_hit
            self._figures.prompt_tokens += request.num_prompt_tokens
            self._figures.hit_tokens += num_hit
        self._running.append(self._next.popleft())
        self._compute(resident, num_hit + num_new)
        return resident

    def _chunk(self, num_tokens: int) -> int:
        return num_tokens if self._setup.chunk is None else min(num_tokens, self._setup.chunk)

    def _advance(self, resident: _Resident) -> None:
        """One turn: a chunk of the prompt, or as many tokens of the answer as a block holds."""
        request = resident.request
        num_new = request.num_tokens - request.num_computed_tokens
        answers = request.num_output_tokens > 0 and num_new == 1
        if answers:
            num_new = min(self._setup.block_size, request.max_tokens - request.num_output_tokens)
        else:
            num_new = self._chunk(num_new)
        while self._manager.allocate_slots(request, num_new) is None:
            victim = self._running.pop()
            self._figures.engine.add(self._record(victim, PREEMPTED))
            self._manager.free(victim.request)
            victim.request.num_computed_tokens = 0
            self._next.appendleft(victim)
            self._figures.preemptions += 1
            if victim is resident:
                return
        if answers:
            request.append_output_token_ids(self._unique_tokens(num_new))
            self._manager.cache_blocks(request, request.num_computed_tokens + num_new)
        self._compute(resident, num_new)

    def _compute(self, resident: _Resident, num_tokens: int) -> None:
        """The model has seen that many more tokens of the request."""
        request = resident.request
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens:
            if request.num_output_tokens == 0 and resident.index >= self._second_half:
                self._figures.prefill.add(self._table(resident))
            request.append_output_token_ids(self._unique_tokens(1))
        done = request.num_computed_tokens == request.num_tokens - 1
        if done and request.num_output_tokens == request.max_tokens:
            record = self._record(resident, "length")
            self._figures.release.add(record.table)
            self._figures.engine.add(record)
            self._manager.free(request)
            self._running.remove(resident)

    def _record(self, resident: _Resident, outcome: str) -> Request:
        """What a block trace would have of it now."""
        request = resident.request
        return Request(
            t=0.0,
            request=request.request_id,
            outcome=outcome,
            group=0,
            prompt=request.num_prompt_tokens,
            tokens=request.num_computed_tokens,
            hit=resident.hit_tokens,
            prefill=None,
            table=self._table(resident),
        )

    def _table(self, resident: _Resident) -> Table:
        (block_ids,) = self._manager.get_block_ids(resident.request.request_id)
        return np.array(block_ids, np.int32)


def _refuse_what_does_not_fit(requests: Sequence[TraceRequest], setup: Setup) -> None:
    """Any other request is served in the end: when it is alone, it has the whole pool."""
    for index, request in enumerate(requests):
        slots = request.input_length + request.output_length - 1  # nobody reads the last token
        if -(-slots // setup.block_size) >= setup.num_blocks:  # one is the null block
            raise ReplayError(
                f"request {index} of the trace, {request.input_length} + {request.output_length} "
                f"tokens, does not fit into {setup.num_blocks} blocks of {setup.block_size}: take "
                "more blocks, or leave out long requests"
            )


def _make_manager(requests: Sequence[TraceRequest], setup: Setup, metrics_collector: Any) -> Any:
    import torch
    import vllm
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    if "scheduler_block_size" not in inspect.signature(KVCacheManager).parameters:
        raise UnsupportedVLLMError(
            f"requests cannot be replayed through the KVCacheManager of vLLM {vllm.__version__}: "
            "install vLLM 0.23.0 or later"
        )

    layer = FullAttentionSpec(
        block_size=setup.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheManager(
        KVCacheConfig(
            num_blocks=setup.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        ),
        max_model_len=max(
            (request.input_length + request.output_length for request in requests), default=1
        ),
        scheduler_block_size=setup.block_size,
        hash_block_size=setup.block_size,
        enable_caching=setup.caching,
        metrics_collector=metrics_collector,
    )


def _request_maker(setup: Setup) -> Callable[[str, list[int], int], Any]:
    """(id, tokens of the prompt, length of the answer) -> a Request of vLLM's."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(setup.block_size, sha256) if setup.caching else None

    def make(request_id: str, prompt: list[int], output_length: int) -> Any:
        return Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=output_length),
            None,
            arrival_time=0.0,
            block_hasher=hasher,
        )

    return make
