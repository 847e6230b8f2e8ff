"""The recorder behind VLLM_BLOCK_TRACE: what vLLM's engine core does with blocks, for a trace file.

It listens where a KVCacheManager frees the blocks of a request (at its end, at an abort, at a
preemption) and where it is reset; for the time that a prefill takes, where it searches the prefix
cache for a request, and once at the end of each step. Nothing is hooked into what happens for each
running request in each step. The hooks keep references to ended requests and their blocks;
`trace_writer.py` makes text of them in a thread of its own, and lets go of them there.

Whatever goes wrong here ends the recording with a warning, and leaves the engine alone.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime, timezone
from importlib import import_module
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any

from pyblockpool import __version__
from pyblockpool.plugin import surface
from pyblockpool.plugin.order import queue_stats
from pyblockpool.settings import QUEUE_VARIABLE, TRACE_VARIABLE, Settings, assignments
from pyblockpool.trace_writer import PREEMPTED, TOKENS_OF_A_BLOCK, TraceWriter

Method = Callable[..., Any]

# The attribute of a KVCacheManager that is being recorded.
_SECTION = "_pyblockpool_section"
# That of a request whose first token is not seen: tokens found in the prefix cache.
_HIT = "_pyblockpool_hit"
# The configuration of the scheduler that is being built. A scheduler that does not derive from
# vLLM's builds its KVCacheManager without one.
_config: ContextVar[Any] = ContextVar("vllm_config", default=None)


class Section:
    """The recording of one engine, kept by its KVCacheManager.

    Its methods are called by vLLM's thread, and do not raise.

    Attributes:
        waiting: requests that have no token since the prefix cache was searched for them: when
            they were scheduled; tokens that they had by then (some, after a preemption); tokens
            found.
        prefilled: requests that have blocks and a token: tokens found, seconds of prefill. Not in
            the requests themselves: each further attribute would make Python copy all.
        in_step: while the output of a step is being dealt with, when that began.
    """

    def __init__(self, manager: Any, writer: TraceWriter, sees_steps: bool) -> None:
        self.writer = writer
        self.waiting: dict[Any, tuple[float, int, int]] = {}
        self.prefilled: dict[Any, tuple[int, float | None]] = {}
        self.in_step: float | None = None
        self._sees_steps = sees_steps
        status = import_module(surface.REQUEST).RequestStatus
        self._running, self._loading = status.RUNNING, status.WAITING_FOR_REMOTE_KVS
        self._ended = {each for each in status if status.is_finished(each)}
        self._outcomes = {each: _outcome(status, each) for each in status}
        self._groups = list(enumerate(manager.coordinator.single_type_managers))
        # When the manager goes, or the process, whatever of both comes first: a process of
        # multiprocessing runs no other exit hooks.
        self.close = Finalize(manager, writer.close, exitpriority=0)

    def looked_up(self, manager: Any, request: Any, found: Any) -> None:
        """In the step that schedules it, or tries to; found: blocks, their tokens, and more."""
        try:
            if self._sees_steps:
                self.waiting[request] = monotonic(), request.num_output_tokens, found[1]
            else:
                setattr(request, _HIT, found[1])
        except Exception as error:
            self._give_up(manager, error)

    def stepped(self, manager: Any, now: float) -> None:
        """The output of a step, which came now, was dealt with, and requests wait for a token."""
        try:
            waiting, self.waiting = self.waiting, {}
            for request, (since, tokens, hit) in waiting.items():
                if request.num_output_tokens > tokens:
                    self.prefilled[request] = hit, now - since
                elif request.status == self._running:
                    self.waiting[request] = since, tokens, hit
                elif request.status == self._loading:  # and will be scheduled without a search
                    self.waiting[request] = now, tokens, hit
                elif request.status in self._ended:  # a connector still has its blocks
                    self.prefilled[request] = hit, None
                # else there was no room for it: there will be a search
        except Exception as error:
            self._give_up(manager, error)

    def freed(self, manager: Any, request: Any) -> None:
        """Just before the blocks are given up."""
        try:
            now = self.in_step or monotonic()
            request_id = request.request_id
            tables: list[Any] = []
            blocks = 0
            pool = manager.block_pool
            for group, each in self._groups:
                # A tier in host memory has a pool, and so ids, of its own.
                if each.block_pool is pool:
                    # The list itself, not a copy: to touch each block is half the time of a copy.
                    table = each.req_to_blocks.get(request_id, ())
                    count = len(table)
                    tables += group, count, table[0] if count else None, table
                    blocks += count
            prefilled = self.prefilled.pop(request, None)
            if prefilled is None:
                prefilled = self._without_prefill(request, now)
            outcome = self._outcomes[request.status]
            tokens = request.num_computed_tokens
            if self._may_be_kept(request, outcome):
                kept = request
                # It holds all tokens of the prompt, computed or not.
                weight = blocks + (request.num_prompt_tokens + tokens) // TOKENS_OF_A_BLOCK
            else:
                kept, weight = Slip(request), blocks
            is_on = self.writer.put_table(now, kept, outcome, tokens, prefilled, weight, tables)
            if not is_on:
                self._leave(manager)
        except Exception as error:
            self._give_up(manager, error)

    def _may_be_kept(self, request: Any, outcome: str) -> bool:
        """Whether the thread may have the request itself, and let go of it."""
        return not (
            outcome == PREEMPTED  # it goes on
            or request.mm_features  # pictures, and the like
            or request.prompt_embeds is not None
            or self.writer.is_behind
        )

    def _without_prefill(self, request: Any, now: float) -> tuple[int, float | None]:
        """Of a request that had no token by the last step: tokens found, seconds of prefill."""
        waiting = self.waiting.pop(request, None)
        if waiting is None:
            return getattr(request, _HIT, 0), None
        since, tokens, hit = waiting
        has_token = self.in_step is not None and request.num_output_tokens > tokens
        return hit, now - since if has_token else None

    def was_reset(self, manager: Any, what: str, done: bool) -> None:
        try:
            self.writer.put_reset(monotonic(), what, bool(done))
        except Exception as error:
            self._give_up(manager, error)

    def _give_up(self, manager: Any, error: Exception) -> None:
        self.writer.stop()
        self._leave(manager)
        surface.log().warning(
            "The recording of block tables has ended: %s: %s", type(error).__name__, error
        )

    def _leave(self, manager: Any) -> None:
        self.waiting.clear()
        self.prefilled.clear()
        with suppress(Exception):
            setattr(manager, _SECTION, None)


class Slip:
    """What a record tells of a request, in place of one that must not be kept."""

    __slots__ = ("num_prompt_tokens", "request_id")

    def __init__(self, request: Any) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens


def _outcome(statuses: Any, status: Any) -> str:
    if statuses.is_finished(status):
        return str(statuses.get_finished_reason(status)).lower()
    # It will start again, and end later: what took its blocks is a preemption, or a KV load that
    # has failed.
    return PREEMPTED


def section_of(manager: Any) -> Section | None:
    """The recording of a KVCacheManager, if there is one."""
    section: Section | None = getattr(manager, _SECTION, None)
    return section


class Recorder:
    """The wrappers that are put over methods of vLLM, and the sections that are open."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sections: weakref.WeakSet[Section] = weakref.WeakSet()
        # Each lives as long as its thread, which can be longer than its section.
        self._writers: weakref.WeakSet[TraceWriter] = weakref.WeakSet()

    def close(self) -> None:
        """End all sections."""
        for section in list(self._sections):
            section.close()

    def knowing_config(self, original: Method) -> Method:
        """For the constructor of Scheduler, in which the KVCacheManager is built."""

        @functools.wraps(original)
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            before = _config.set(kwargs.get("vllm_config", args[0] if args else None))
            try:
                original(scheduler, *args, **kwargs)
            finally:
                _config.reset(before)

        return __init__

    def beginning(self, original: Method) -> Method:
        """For the constructor of KVCacheManager."""

        @functools.wraps(original)
        def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
            original(manager, *args, **kwargs)
            self._begin(manager)

        return __init__

    def _begin(self, manager: Any) -> None:
        asked = assignments({TRACE_VARIABLE: str(self._settings.trace)})
        path = str(self._settings.trace).replace("%p", str(os.getpid()))
        try:
            config = _config.get()
            header = _header(self._settings, manager, config)
            if not header["groups"]:
                surface.log().info("No block tables are recorded: this model has no KV cache")
                return
            writer = self._open(path, header)
            try:
                section = Section(manager, writer, sees_steps=config is not None)
                setattr(manager, _SECTION, section)
                self._sections.add(section)
            except BaseException:
                writer.stop()
                raise
        except BlockingIOError:
            surface.log().warning(
                "%s: another engine writes to this file; this one (pid %d) is not recorded. %s",
                asked,
                os.getpid(),
                "Of the engines of one process, one is recorded at a time"
                if "%p" in str(self._settings.trace)
                else "Put %p into the name: it becomes the process id",
            )
        except OSError as error:
            surface.log().warning(
                "%s: nothing is recorded, as the file cannot be written: %s",
                asked,
                error.strerror or error,
            )
        except Exception as error:
            surface.log().warning(
                "%s: nothing is recorded: %s: %s", asked, type(error).__name__, error
            )
        else:
            surface.log().info("Recording block tables in %s", path)

    def _open(self, path: str, header: dict[str, Any]) -> TraceWriter:
        try:
            writer = TraceWriter(path, header, surface.log().warning)
        except BlockingIOError:
            if not list(self._writers):
                raise
            # The file may be that of an engine of this process that was dropped: a cycle that is
            # still there, or one that is just being ended, by a thread that does not wait for it.
            gc.collect()
            for other in list(self._writers):
                if other.is_over:
                    other.close()
            writer = TraceWriter(path, header, surface.log().warning)
        self._writers.add(writer)
        return writer


def before_freeing(original: Method) -> Method:
    """For the methods of KVCacheManager that take the blocks of a request away."""

    @functools.wraps(original)
    def free(manager: Any, request: Any) -> Any:
        # Not section_of(): this and the next run once a request, and a call is much of their time.
        section = getattr(manager, _SECTION, None)
        if section is not None:
            section.freed(manager, request)
        return original(manager, request)

    return free


def after_lookup(original: Method) -> Method:
    """For the methods of KVCacheManager that search the prefix cache for a request."""

    @functools.wraps(original)
    def get_computed_blocks(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(manager, request, *args, **kwargs)  # vLLM 0.33 can bound the search
        section = getattr(manager, _SECTION, None)
        if section is not None:
            section.looked_up(manager, request, found)
        return found

    return get_computed_blocks


def after_step(original: Method) -> Method:
    """For ``Scheduler.update_from_output``."""

    @functools.wraps(original)
    def update_from_output(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        manager = getattr(scheduler, "kv_cache_manager", None)
        section = getattr(manager, _SECTION, None)
        if section is None:
            return original(scheduler, scheduler_output, model_runner_output)
        now = section.in_step = monotonic()
        try:
            outputs = original(scheduler, scheduler_output, model_runner_output)
        finally:
            section.in_step = None
        if section.waiting:
            section.stepped(manager, now)
        return outputs

    return update_from_output


def after_reset(what: str) -> Callable[[Method], Method]:
    """For the resets of KVCacheManager."""

    def wrapper(original: Method) -> Method:
        @functools.wraps(original)
        def reset(manager: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(manager, *args, **kwargs)
            section = section_of(manager)
            if section is not None:
                section.was_reset(manager, what, done)
            return done

        return reset

    return wrapper


def at_shutdown(original: Method) -> Method:
    """For ``EngineCore.shutdown``, after which the process may be killed."""

    @functools.wraps(original)
    def shutdown(core: Any, *args: Any, **kwargs: Any) -> Any:
        section = section_of(getattr(getattr(core, "scheduler", None), "kv_cache_manager", None))
        if section is not None:
            section.close()
        return original(core, *args, **kwargs)

    return shutdown


def _header(settings: Settings, manager: Any, config: Any) -> dict[str, Any]:
    """What the pool is really like, as the engine has resolved it."""
    pool = manager.block_pool
    queue = queue_stats(pool.free_block_queue)
    coordinator = manager.coordinator
    groups = zip(
        coordinator.single_type_managers, coordinator.kv_cache_config.kv_cache_groups, strict=True
    )
    return {
        "pyblockpool": __version__,
        "vllm": surface.vllm_version(),
        "queue": settings.variables().get(QUEUE_VARIABLE),
        "policy": queue["policy"],
        "implementation": queue["implementation"],
        "extent": queue["size"] if queue["policy"] == "extent" else None,
        "model": None if config is None else config.model_config.model,
        "attention": None if config is None else _attention(config, coordinator.kv_cache_config),
        "pid": os.getpid(),
        "dp_rank": None if config is None else _dp_rank(config.parallel_config),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "num_blocks": pool.num_gpu_blocks,
        "caching": bool(manager.enable_caching),
        "groups": [
            {
                # Under context parallelism, of the whole sequence: each rank has a part of them.
                "block_size": each.block_size,
                "kind": type(each.kv_cache_spec).__name__,
                "layers": len(group.layer_names),
            }
            for each, group in groups
        ],
    }


def _attention(config: Any, kv_cache_config: Any) -> str | None:
    """The backends of the layers that have a KV cache, or the one that was asked for."""
    # Only in the process that runs the model are there layers to ask.
    layers = config.compilation_config.static_forward_context
    asked = [
        getattr(layers.get(name), "get_attn_backend", None)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    ]
    if names := {ask().get_name() for ask in asked if ask is not None}:
        return ", ".join(sorted(names))
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return None if backend is None else str(backend.name)


def _dp_rank(parallel_config: Any) -> int | None:
    """None without data parallelism."""
    rank = getattr(parallel_config, "data_parallel_index", parallel_config.data_parallel_rank)
    # vLLM makes the ranks of a dense model independent, as if each were the only one. What is left
    # of rank 0 is the name of its process.
    named = multiprocessing.current_process().name.startswith("EngineCore_DP")
    return int(rank) if rank or named or parallel_config.data_parallel_size > 1 else None
