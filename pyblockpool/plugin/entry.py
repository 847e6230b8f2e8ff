"""vLLM's entry point: asked for? -> probe -> apply -> prove -> one log line.

vLLM calls `register()` in every process: front ends, engine cores, workers. It logs and swallows
errors at the import of this module but not in the function, so everything that can fail is
imported inside.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyblockpool.settings import Settings, assignments

if TYPE_CHECKING:
    from pyblockpool.plugin.patches import Applied


@dataclass(frozen=True)
class _Active:
    settings: Settings
    patches: Applied


_active: _Active | None = None
# vLLM loads plugins once in each process, but whoever embeds it may start engines from two threads.
_lock = threading.Lock()


def register() -> None:
    """Do what the environment asks for, or raise; called again, change nothing.

    Raises:
        SettingsError: the variable has a value that is not allowed.
        NotCompiledError: the compiled module does not load.
        UnsupportedVLLMError: this vLLM lacks, or does otherwise, something that is needed.
        ConflictError: somebody else has replaced the queue, the pool, the block class or a method
            on the way of the order reset or of the block trace, or a variable has changed since
            the first call.
    """
    global _active
    settings = Settings.from_environ(os.environ)
    with _lock:
        if _active is None:
            if settings.variables():
                _active = _Active(settings, _switch_on(settings))
        elif settings != _active.settings:
            from pyblockpool.errors import ConflictError

            before, now = _active.settings.variables(), settings.variables()
            changed = [
                f"{name} has changed from {before.get(name)!r} to {now.get(name)!r}"
                for name in before | now
                if before.get(name) != now.get(name)
            ]
            raise ConflictError(
                f"{' and '.join(changed)} in a process in which pyblockpool is active: set it "
                "before vLLM starts"
            )


def restore() -> None:
    """Take back every change to vLLM.

    Raises:
        RuntimeError: native queues are alive; nothing is changed.
        ConflictError: somebody has replaced the queue or one of our methods once more; nothing is
            changed.
    """
    global _active
    with _lock:
        if _active is not None:
            _active.patches.undo()
            _active = None


def _switch_on(settings: Settings) -> Applied:
    from pyblockpool import __version__
    from pyblockpool.errors import ConflictError, UnsupportedVLLMError
    from pyblockpool.plugin import patches, proof, surface

    asked = assignments(settings.variables())
    troubles = [finding for finding in surface.probe(settings) if finding.error]
    if troubles:
        # Who has to act is more to the point than what is missing because of it.
        conflict = any(finding.error is ConflictError for finding in troubles)
        raise (ConflictError if conflict else UnsupportedVLLMError)(
            f"{asked} cannot be done here: " + "; ".join(finding.sentence for finding in troubles)
        )
    if settings.queue is None:  # there is nothing that pools would do otherwise
        applied = patches.Applied(patches.patches(settings))
    else:
        try:
            expected = proof.expected_trace(settings)
        except Exception as error:
            raise UnsupportedVLLMError(
                f"{asked} cannot be done here: a BlockPool of vLLM {surface.vllm_version()} cannot "
                f"be tried out ({type(error).__name__}: {error}); install a pyblockpool made for it"
            ) from error
        applied = patches.Applied(patches.patches(settings))
        if trouble := proof.counterexample(settings, expected):
            left = applied.roll_back()
            raise UnsupportedVLLMError(f"{asked} was taken back: {trouble}{left}")

    surface.log().info(
        "pyblockpool %s: %s, vLLM %s, pid %d",
        __version__,
        _description(settings),
        surface.vllm_version(),
        os.getpid(),
    )
    return applied


def _description(settings: Settings) -> str:
    # Front ends and workers say this, too: whether an engine core can record, it tells by itself.
    recorded = ""
    if settings.trace is not None:
        recorded = f", engine cores are asked to record block tables in {settings.trace}"
    if settings.queue is None:
        return f"vLLM's free-block queue untouched{recorded}"
    if settings.queue == "python":
        return f"vLLM's free-block queue with the order reset{recorded}"
    extents = ""
    if settings.policy == "extent":
        extents = f" over extents of {f'{settings.size} blocks' if settings.size else '128 tokens'}"
        extents += ", tails packed" if settings.pack_tails else ""
    return f"native free-block queue, policy {settings.policy}{extents}{recorded}"
