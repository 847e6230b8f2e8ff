"""vLLM's entry point: asked for? -> probe -> apply -> prove -> one log line.

vLLM calls `register()` in every process: front ends, engine cores, workers. It logs and swallows
errors at the import of this module but not in the function, so everything that can fail is
imported inside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pyblockpool.settings import QUEUE_VARIABLE, Settings


@dataclass(frozen=True)
class _Active:
    settings: Settings
    undo: Callable[[], None]


_active: _Active | None = None
# vLLM loads plugins once in each process, but whoever embeds it may start engines from two threads.
_lock = threading.Lock()


def register() -> None:
    """Do what the environment asks for, or raise; called again, change nothing.

    Raises:
        SettingsError: the variable has a value that is not allowed.
        NotCompiledError: the compiled module does not load.
        UnsupportedVLLMError: this vLLM lacks, or does otherwise, something that is needed.
        ConflictError: somebody else has replaced the queue, the pool or the block class, or the
            variable has changed since the first call.
    """
    global _active
    settings = Settings.from_environ(os.environ)
    with _lock:
        if _active is None:
            if settings.queue is not None:
                _active = _Active(settings, _switch_on(settings.queue))
        elif settings != _active.settings:
            from pyblockpool.errors import ConflictError

            raise ConflictError(
                f"{QUEUE_VARIABLE} has changed from {_active.settings.queue!r} to "
                f"{settings.queue!r} in a process in which pyblockpool is active: set it before "
                "vLLM starts"
            )


def restore() -> None:
    """Take back every change to vLLM.

    Raises:
        RuntimeError: native queues are alive; nothing is changed.
        ConflictError: somebody has replaced the queue once more; nothing is changed.
    """
    global _active
    with _lock:
        if _active is not None:
            _active.undo()
            _active = None


def _switch_on(queue: str) -> Callable[[], None]:
    from pyblockpool import FreeBlockQueue, __version__
    from pyblockpool.errors import UnsupportedVLLMError
    from pyblockpool.plugin import patches, proof, surface

    troubles = [finding for finding in surface.probe() if finding.error]
    for finding in troubles:
        assert finding.error is not None
        raise finding.error(
            f"{QUEUE_VARIABLE}={queue} cannot be done here: "
            + "; ".join(trouble.sentence for trouble in troubles)
        )
    expected = proof.trace_of_a_pool()
    undo = patches.apply_all(patches.PATCHES[queue])
    trouble = proof.disproof(expected, FreeBlockQueue if queue == "native" else None)
    if trouble:
        undo()
        raise UnsupportedVLLMError(f"{QUEUE_VARIABLE}={queue} was taken back: {trouble}")

    from vllm.logger import init_logger

    init_logger("vllm.plugins.pyblockpool").info(
        "pyblockpool %s: %s free-block queue, policy lru, vLLM %s, pid %d",
        __version__,
        queue,
        surface.vllm_version(),
        os.getpid(),
    )
    return undo
