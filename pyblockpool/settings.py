"""The environment variables that switch pyblockpool on, parsed once into a frozen record.

Their names begin with ``VLLM_``, because Ray passes on such variables and no others.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from pyblockpool.errors import SettingsError

QUEUE_VARIABLE = "VLLM_BLOCK_QUEUE"
TRACE_VARIABLE = "VLLM_BLOCK_TRACE"
MAX_EXTENT_SIZE = 4096

# What each value of the variable asks for.
QUEUES = {
    "python": "vLLM's own queue, with the order reset",
    "native": "pyblockpool's queue, policy lru: the same blocks in the same order",
    "native:sorted": "policy sorted: blocks that are not cached go first, lowest ids first",
    "native:extent": "policy extent: LRU over aligned extents of 128 tokens",
    "native:extent,size=E": f"extents of E blocks, a power of two from 1 to {MAX_EXTENT_SIZE}",
    "native:extent,pack_tails": "tables share their last extents; size=E may stand before it",
}


def assignments(variables: Mapping[str, str]) -> str:
    """As they stand before a command in a shell: "" as two quotes, blanks within quotes."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        queue: ``"python"`` or ``"native"``, or None when nothing is to be touched.
        policy: of a native queue.
        size: blocks in an extent, None for as many as hold 128 tokens.
        pack_tails: whether tables share their last, partly filled extents.
        trace: name of the file that block tables are recorded in, in which ``%p`` stands for the
            process id; None when nothing is to be recorded.
    """

    queue: str | None = None
    policy: str = "lru"
    size: int | None = None
    pack_tails: bool = False
    trace: str | None = None

    def __str__(self) -> str:
        """The value of VLLM_BLOCK_QUEUE that asks for this."""
        policy = "" if self.policy == "lru" else f":{self.policy}"
        size = "" if self.size is None else f",size={self.size}"
        return f"{self.queue}{policy}{size}" + (",pack_tails" if self.pack_tails else "")

    def variables(self) -> dict[str, str]:
        """The variables that ask for this, and their values; empty for an untouched vLLM."""
        asked = {} if self.queue is None else {QUEUE_VARIABLE: str(self)}
        return asked if self.trace is None else asked | {TRACE_VARIABLE: self.trace}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variables; SettingsError, which says what is allowed, for any other value."""
        trace = environ.get(TRACE_VARIABLE)
        if trace == "":
            raise SettingsError(
                f"{TRACE_VARIABLE} is empty: give it the name of the file to record block tables "
                "in (%p in it becomes the process id), or unset it to record nothing."
            )
        value = environ.get(QUEUE_VARIABLE)
        if value is None:
            return cls(trace=trace)
        if value in ("python", "native"):
            return cls(queue=value, trace=trace)
        if value == "native:sorted":
            return cls(queue="native", policy="sorted", trace=trace)
        if extent := re.fullmatch("native:extent(?:,size=([1-9][0-9]{0,3}))?(,pack_tails)?", value):
            size = None if extent[1] is None else int(extent[1])
            if size is None or (size <= MAX_EXTENT_SIZE and size & (size - 1) == 0):
                packs = extent[2] is not None
                return cls("native", "extent", size=size, pack_tails=packs, trace=trace)
        allowed = "; ".join(f"{name!r} ({meaning})" for name, meaning in QUEUES.items())
        raise SettingsError(
            f"{QUEUE_VARIABLE}={value!r} is not allowed. Allowed are {allowed}. "
            "Unset the variable to leave vLLM untouched."
        )
