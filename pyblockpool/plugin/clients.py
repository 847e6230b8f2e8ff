"""How each class between a front end and an engine core asks what is below it.

One function for each, ``ask(self, method, *arguments)``: the order reset needs all engines and the
truth, an error that names the cause, and no hang.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import re
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pyblockpool.errors import InactiveError
from pyblockpool.plugin.surface import RESET_PREFIX_CACHE, STATS, name_of
from pyblockpool.settings import QUEUE_VARIABLE

Method = Callable[..., Any]

# Seconds between two looks at whether an engine core that owes an answer is alive.
HEARTBEAT = 1.0
SHUT_DOWN = "this engine has been shut down, or its engine core has died: start a new one"
INACTIVE = (
    f"pyblockpool is not active in the engine core: set {QUEUE_VARIABLE} to native (or to python, "
    "which keeps vLLM's queue) in the environment in which the engine starts; if VLLM_PLUGINS is "
    "set there, it has to name pyblockpool"
)


def ask_llm_engine(llm: Any, method: str, *arguments: bool) -> Any:
    return _method_of(llm.llm_engine, method, arguments)(*arguments)


def ask_client(engine: Any, method: str, *arguments: bool) -> Any:
    return _method_of(engine.engine_core, method, arguments)(*arguments)


async def ask_async_client(engine: Any, method: str, *arguments: bool) -> Any:
    return await _method_of(engine.engine_core, f"{method}_async", arguments)(*arguments)


def _method_of(below: Any, method: str, arguments: tuple[bool, ...]) -> Method:
    found: Method = getattr(below, method)
    if arguments and "reorder_free_queue" not in inspect.signature(found).parameters:
        raise NotImplementedError(
            f"{name_of(type(below))}.{method}() is not vLLM's and does not take "
            "reorder_free_queue: call it without, and reset_free_block_queue_order() after it"
        )
    return found


def ask_core(client: Any, method: str, *arguments: bool) -> Any:
    """In the same process: from another thread too, but not while the engine changes its blocks."""
    turn = _turn_of(client)
    while True:
        if turn.is_over:
            raise RuntimeError(f"{method}(): {SHUT_DOWN}")
        if turn.taken_by:
            raise RuntimeError(
                f"{method}(): this engine is in the middle of {turn.taken_by}: call between steps, "
                "from the thread that drives the engine"
            )
        if turn.lock.acquire(timeout=0.01):  # calls like this one are worth waiting for
            break
    try:
        return getattr(client.engine_core, method)(*arguments)
    finally:
        turn.lock.release()


class _Turn:
    """Who may look at or change the free blocks of an engine in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.taken_by = ""
        self.is_over = False


def _turn_of(client: Any) -> _Turn:
    # `setdefault` is one operation: two threads get the same one.
    turn: _Turn = vars(client).setdefault("_pyblockpool_turn", _Turn())
    return turn


def in_turn(original: Method) -> Method:
    """For the methods through which the engine changes its blocks."""
    name = original.__name__

    @functools.wraps(original)
    def take_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        turn = _turn_of(self)
        with turn.lock:
            before, turn.taken_by = turn.taken_by, "a step" if name == "get_output" else f"{name}()"
            try:
                return original(self, *args, **kwargs)
            finally:
                turn.taken_by = before

    return take_turn


def end_turns(original: Method) -> Method:
    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        _turn_of(self).is_over = True
        return original(self, *args, **kwargs)

    return shutdown


def ask_core_process(client: Any, method: str, *arguments: bool) -> Any:
    _refuse_if_dead(client, method)
    # vLLM leaves a call unanswered for ever when the engine core dies under it, so somebody else
    # has to wait for the answer.
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def call() -> None:
        try:
            answer.set_result(client.call_utility(method, *arguments))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True, name="pyblockpool-call").start()
    while not concurrent.futures.wait([answer], timeout=HEARTBEAT).done:
        _refuse_if_dead(client, method)
    try:
        return answer.result()
    except Exception as error:
        if _tells_of_no_plugin(error, method):
            raise InactiveError(INACTIVE) from error
        if _may_count_arguments(error, method):
            try:
                ask_core_process(client, STATS)
            except InactiveError:
                raise
            except Exception:
                pass  # of no interest: the first error is the one to tell
        raise


async def ask_core_processes(client: Any, method: str, *arguments: bool) -> Any:
    """All engines of this client: vLLM's own utility call tells the answer of the first one only.

    Returns:
        Whether all said yes; of statistics, a list in the order of ranks, from one engine a dict.
    """
    _refuse_if_dead(client, method)
    reader = client.resources.output_queue_task
    if reader is not None and reader.get_loop() is not asyncio.get_running_loop():
        raise RuntimeError(
            f"{method}(): this engine belongs to another event loop, and its answers arrive only "
            "there: use asyncio.run_coroutine_threadsafe(), with that loop, or start the engine in "
            "the loop that uses it"
        )
    answers = asyncio.gather(
        *(
            client._call_utility_async(method, *arguments, engine=engine)
            for engine in client.core_engines
        )
    )
    try:
        while not (await asyncio.wait([answers], timeout=HEARTBEAT))[0]:
            _refuse_if_dead(client, method)
        told = answers.result()
    except Exception as error:
        if _tells_of_no_plugin(error, method):
            raise InactiveError(INACTIVE) from error
        if _may_count_arguments(error, method):
            try:
                await ask_core_processes(client, STATS)
            except InactiveError:
                raise
            except Exception:
                pass  # of no interest: the first error is the one to tell
        raise
    finally:
        answers.cancel()
    if method != STATS:
        return all(told)
    return told if len(told) > 1 else told[0]


def _refuse_if_dead(client: Any, method: str) -> None:
    # vLLM shuts a client down when its engine core has died, too.
    if client.resources.engine_dead:
        dead: type[Exception] = import_module("vllm.v1.engine.exceptions").EngineDeadError
        raise dead(f"{method}(): {SHUT_DOWN}")


def _tells_of_no_plugin(error: Exception, method: str) -> bool:
    return (
        re.search(rf"'\w*EngineCore\w*' object has no attribute '{method}'", str(error)) is not None
    )


def _may_count_arguments(error: Exception, method: str) -> bool:
    """Whether it may be that one argument more was sent than there are parameters.

    vLLM asserts that with no message, or, under `python -O`, leaves it to the call. Other errors
    look alike: the statistics, which take no argument, tell whether the plugin is there.
    """
    message = str(error)
    return method == RESET_PREFIX_CACHE and (
        message == f"Call to {method} method failed: " or "positional arguments but" in message
    )
