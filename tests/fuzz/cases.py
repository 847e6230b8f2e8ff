"""A case: a setting and the operations that are played under it. Kept as JSON, replayed, shrunk."""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pool_scene
import queue_scene
from scenes import Divergence, Operation, Setting

FOLDER = Path(__file__).parent / "cases"
SETTINGS: dict[str, Any] = {
    setting.kind: setting for setting in (queue_scene.QueueSetting, pool_scene.PoolSetting)
}
# A case that takes more processor time than this hangs: a busy machine cannot make it.
SECONDS = 60
# So much longer by the clock hangs, too: it waits for something.
PATIENCE = 20
# A look at the specification takes as long as the square of the number of blocks.
LOOK_BLOCKS = 500_000
MEMORY = 3 << 30
# How it is told that a process has not come to its end.
DEATHS = ("killed by", "does not end", "exits with")


@dataclass(frozen=True)
class Case:
    """What a failure needs to happen again.

    Attributes:
        setting: of the scene.
        operations: in order; the last one may be the one that fails.
        found: what was wrong, in words.
    """

    setting: Setting
    operations: list[Operation]
    found: str = ""

    def write(self, path: Path) -> None:
        """A value of the setting a line, an operation a line, so that people can read it."""
        setting = [
            f"{json.dumps(name)}: {json.dumps(it)}" for name, it in vars(self.setting).items()
        ]
        operations = [json.dumps(operation) for operation in self.operations]
        parts = [
            f'"kind": {json.dumps(self.setting.kind)}',
            f'"found": {json.dumps(self.found)}',
            f'"setting": {{{_indented(setting, 4)}\n  }}',
            f'"operations": [{_indented(operations, 4)}\n  ]',
        ]
        path.write_text(f"{{{_indented(parts, 2)}\n}}\n")

    @classmethod
    def read(cls, path: Path) -> Case:
        raw = json.loads(path.read_text())
        return cls(SETTINGS[raw["kind"]](**raw["setting"]), raw["operations"], raw["found"])


def _indented(items: list[str], by: int) -> str:
    return ",".join(f"\n{' ' * by}{item}" for item in items)


def replay(case: Case) -> None:
    """Play a case and compare everything after each operation. Raises `Divergence`.

    After every few, where there are many of them or many blocks.
    """
    every = 1 + len(case.operations) * case.setting.num_ids**2 // LOOK_BLOCKS
    try:
        scene = case.setting.scene()
        scene.look()
        for done, operation in enumerate(case.operations, 1):
            scene.do(operation)
            if done % every:
                scene.glance()
            else:
                scene.look()
        scene.look()
    except Divergence:
        raise
    except Exception as error:
        raise Divergence(f"{type(error).__name__}: {error}") from error


def outcome(case: Case) -> str:
    """What goes wrong when a case is replayed, "" if nothing does.

    It is played in a child process, as it may crash or hang.
    """
    return in_a_child(lambda: replay(case))


def outcome_here(case: Case) -> str:
    """The same in this process, which is faster."""
    try:
        replay(case)
    except Divergence as error:
        return str(error)
    return ""


def in_a_child(play: Callable[[], None], seconds: int = SECONDS) -> str:
    """What goes wrong in `play()`, "" if nothing does."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        _play_and_exit(play, readable, writable, seconds)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        return (
            f"does not end in {seconds} s"
            if number in (signal.SIGPROF, signal.SIGALRM)
            else f"killed by {name}"
        )
    return said if said or not status else f"exits with {os.waitstatus_to_exitcode(status)}"


def limit_time(seconds: float) -> None:
    """Of the processor, from now on: SIGPROF ends the process then, or SIGALRM much later."""
    for name, timer, limit in (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, PATIENCE * seconds),
    ):
        signal.signal(name, signal.SIG_DFL)
        signal.setitimer(timer, limit)


def limit_memory() -> None:
    """For the rest of this process: a walk without end runs into it before the machine does."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _play_and_exit(play: Callable[[], None], readable: int, writable: int, seconds: int) -> None:
    try:
        os.close(readable)
        limit_time(seconds)
        limit_memory()
        try:
            play()
        except Divergence as error:
            os.write(writable, str(error)[:4000].encode())
        except BaseException:
            os.write(writable, traceback.format_exc()[-4000:].encode())
    finally:
        os._exit(0)


def shrink(case: Case, fails: Callable[[Case], str], is_over: Callable[[], bool]) -> Case:
    """A smaller case that fails, too.

    Operations are taken away in ever smaller pieces, then numbers and lists in them get smaller and
    the setting simpler, over and over, until nothing more can be left out.

    Args:
        case: a case that fails.
        fails: says what goes wrong, "" if nothing does.
        is_over: whether the time for this is.
    """

    def improve(case: Case, candidates: Iterator[Case]) -> Case | None:
        for candidate in candidates:
            if is_over():
                return None
            found = fails(candidate)
            if found:
                return replace(candidate, found=found)
        return None

    better: Case | None = case
    while better is not None:
        case = _without_pieces(better, fails, is_over)
        better = improve(case, _simpler(case))
    return case


def _without_pieces(case: Case, fails: Callable[[Case], str], is_over: Callable[[], bool]) -> Case:
    size = len(case.operations)
    while size:
        start = max(0, len(case.operations) - size)
        # From the end, as what comes after the failure is the first to go.
        while True:
            shorter = case.operations[:start] + case.operations[start + size :]
            found = fails(replace(case, operations=shorter))
            if found:
                case = replace(case, operations=shorter, found=found)
            if is_over():
                return case
            if not start:
                break
            start = max(0, start - size)
        size //= 2
    return case


def _simpler(case: Case) -> Iterator[Case]:
    for setting in case.setting.simpler():
        if setting != case.setting:
            yield replace(case, setting=setting)
    for at, operation in enumerate(case.operations):
        for simpler in _simpler_operations(operation):
            operations = [*case.operations[:at], simpler, *case.operations[at + 1 :]]
            yield replace(case, operations=operations)


def _simpler_operations(operation: Operation) -> Iterator[Operation]:
    for at, argument in enumerate(operation):
        smaller: list[Any] = []
        if isinstance(argument, list):
            smaller = [argument[:i] + argument[i + 1 :] for i in range(len(argument))]
        elif isinstance(argument, int) and argument > 0:
            smaller = sorted({0, argument // 2, argument - 1})
        for one in smaller:
            yield [*operation[:at], one, *operation[at + 1 :]]
