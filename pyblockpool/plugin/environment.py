"""What the environment asks for, and what it does to the plugin: variables, and other plugins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pyblockpool.doctor import VARIABLES, Remark, reason
from pyblockpool.errors import SettingsError
from pyblockpool.plugin import surface
from pyblockpool.plugin.installation import GENERAL_PLUGINS, NAME
from pyblockpool.settings import QUEUE_VARIABLE, QUEUES, TRACE_VARIABLE, Settings, assignments
from pyblockpool.trace_writer import MAGIC, SOMETHING_ELSE

PLUGINS = "VLLM_PLUGINS"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
# What vLLM does where they are not set.
SWITCHES = {DEV_MODE: False, RUST_FRONTEND: False, MULTIPROCESSING: True}


def what_is_asked() -> tuple[Settings, list[Remark]]:
    """What the variables of pyblockpool ask for; one that is not allowed asks for nothing."""
    queue, wrong_queue = _read(QUEUE_VARIABLE)
    trace, wrong_trace = _read(TRACE_VARIABLE)
    remarks = [wrong_queue or _queue(queue), wrong_trace or _trace(trace.trace)]
    return replace(queue, trace=trace.trace), remarks


def _read(variable: str) -> tuple[Settings, Remark | None]:
    """What one variable asks for by itself, so that its fault does not hide that of another."""
    alone = {name: value for name, value in os.environ.items() if name == variable}
    try:
        return Settings.from_environ(alone), None
    except SettingsError as error:
        return Settings(), Remark("environment", "bad", str(error))


def _queue(settings: Settings) -> Remark:
    if settings.queue is None:
        sentence = f"{QUEUE_VARIABLE} is not set: vLLM's queue stays as it is"
    else:
        sentence = f"{QUEUE_VARIABLE}={settings} is set ({meaning(settings)})"
    return Remark("environment", "good", sentence)


def _trace(file: str | None) -> Remark:
    """Whether a trace could be written; its file is left alone."""
    if file is None:
        sentence = f"{TRACE_VARIABLE} is not set: block tables are not recorded"
        return Remark("environment", "good", sentence)
    path = Path(file.replace("%p", str(os.getpid()))).absolute()
    trouble = ""
    if not path.parent.is_dir():
        trouble = f"there is no folder {path.parent}"
    elif path.exists() and not path.is_file():
        trouble = "that is not a regular file"
    elif not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
        trouble = f"{path if path.exists() else path.parent} is not writable"
    elif path.exists() and not _is_trace(path):
        trouble = SOMETHING_ELSE
    if trouble:
        sentence = (
            f"{assignments({TRACE_VARIABLE: file})} would record nothing: {trouble}. (The engine "
            "would run, with a warning.) Name a file that can be written"
        )
        return Remark("environment", "bad", sentence)
    kept = ", behind what is there" if path.exists() else ""
    meant = " (%p: the process id of the engine)" if "%p" in file else ""
    sentence = (
        f"{TRACE_VARIABLE} is set: block tables would be recorded in {Path(file).absolute()}{kept}"
        f"{meant}"
    )
    return Remark("environment", "good", sentence)


def _is_trace(path: Path) -> bool:
    """Or empty: the recorder appends to nothing else."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (b"", MAGIC)


def meaning(settings: Settings) -> str:
    """What VLLM_BLOCK_QUEUE asks for, in words."""
    value, _, options = str(settings).partition(",")
    return f"policy {settings.policy}, with {options}" if options else QUEUES[value]


def _allowed_plugins() -> list[str] | None:
    """As vLLM reads the variable: commas, and no blanks are stripped."""
    value = os.environ.get(PLUGINS)
    return None if value is None else value.split(",")


def whether_loaded(asked: Mapping[str, str]) -> Iterator[Remark]:
    """Whether vLLM is allowed to load the plugin."""
    allowed = _allowed_plugins()
    if allowed is None:
        yield Remark("environment", "good", f"{PLUGINS} is not set: vLLM loads all general plugins")
    elif NAME in allowed:
        yield Remark("environment", "good", f"{PLUGINS} names {NAME}: vLLM loads the plugin")
    else:
        blanks = " (blanks count)" if NAME in map(str.strip, allowed) else ""
        names = [name.strip() for name in allowed if name.strip() not in ("", NAME)]
        yield Remark(
            "environment",
            "bad" if asked else "note",
            f"{assignments({PLUGINS: os.environ[PLUGINS]})} does not name {NAME}{blanks}: vLLM "
            f"does not load the plugin, and {' and '.join(asked or VARIABLES)} would have no "
            f"effect. Set {assignments({PLUGINS: ','.join([*names, NAME])})}, or unset it",
        )


def switches() -> Iterator[Remark]:
    """vLLM's own variables, as the installed vLLM reads them."""
    envs = _module_or_none("vllm.envs")
    on: dict[str, bool] = {}
    for name, default in SWITCHES.items():
        try:
            on[name] = bool(getattr(envs, name, default))
        except Exception as error:
            on[name] = default
            yield Remark(
                "environment",
                "bad",
                f"vLLM cannot read {name}={os.environ.get(name)!r} ({reason(error)}): set it to 0 "
                "or 1",
            )
    if not on[MULTIPROCESSING]:
        yield Remark(
            "environment",
            "note",
            f"{MULTIPROCESSING}=0: the engine core is in the process of the front end, and the log "
            "line of the plugin may be lost; free_block_queue_stats() says what is active",
        )
    if on[RUST_FRONTEND]:
        yield Remark(
            "environment",
            "note",
            f"{RUST_FRONTEND}=1: `vllm serve` has a front end that cannot pass the order reset and "
            "the figures on; the queue itself works behind it",
        )
    missing = []
    if not hasattr(_module_or_none("vllm.plugins"), "ENDPOINT_PLUGINS_GROUP"):
        missing.append("this vLLM has no endpoint plugins (0.26.0 and later have)")
    if not on[DEV_MODE]:
        missing.append(f"{DEV_MODE} is not 1")
    if NAME not in (_allowed_plugins() or ()):
        missing.append(f"{PLUGINS} does not name {NAME}")
    if on[RUST_FRONTEND]:
        missing.append("the Rust front end loads no endpoint plugins")
    routes = f"POST /{surface.RESET_ORDER} and GET /{surface.STATS}"
    if missing:
        sentence = f"a server would not have the routes {routes}: {'; '.join(missing)}"
    else:
        sentence = f"a server would have the routes {routes}, for anybody who reaches it"
    yield Remark("environment", "note" if missing else "good", sentence)


def other_plugins(*, run: bool) -> Iterator[Remark]:
    """General plugins beside ours and vLLM's own, which vLLM would load."""
    allowed = _allowed_plugins()
    others: Iterable[EntryPoint] = [
        point
        for point in entry_points(group=GENERAL_PLUGINS)
        if point.name != NAME
        and not point.value.startswith("vllm.")
        and (allowed is None or point.name in allowed)
    ]
    for point in others:
        title = f"vLLM also loads the general plugin {point.name} ({point.value})"
        if not run:
            yield Remark(
                "environment",
                "note",
                f"{title}: whether it replaces what pyblockpool replaces shows when it has run. "
                "With --load-plugins the doctor runs it first",
            )
            continue
        try:
            point.load()()
        except Exception as error:
            yield Remark("environment", "note", f"{title}, which fails ({reason(error)})")
        else:
            yield Remark("environment", "good", f"{title}: it was run before the probe")


def _module_or_none(name: str) -> Any | None:
    with contextlib.suppress(Exception):
        return import_module(name)
    return None
