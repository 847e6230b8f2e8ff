"""The environment variable that switches pyblockpool on, parsed once into a frozen record.

One variable, because Ray passes on variables that begin with ``VLLM_`` and no others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pyblockpool.errors import SettingsError

QUEUE_VARIABLE = "VLLM_BLOCK_QUEUE"
MAX_EXTENT_SIZE = 4096

# What each value of the variable asks for.
QUEUES = {
    "python": "vLLM's own queue, with the order reset",
    "native": "pyblockpool's queue, policy lru: the same blocks in the same order",
    "native:sorted": "policy sorted: unhashed blocks with the lowest ids first",
    "native:extent": "policy extent: LRU over aligned extents of 128 tokens",
    "native:extent,size=E": f"extents of E blocks, a power of two from 1 to {MAX_EXTENT_SIZE}",
    "native:extent,pack_tails": "tables share their last extents; size=E may stand before it",
}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        queue: ``"python"`` or ``"native"``, or None when nothing is to be touched.
        policy: of a native queue.
        size: blocks in an extent, None for as many as hold 128 tokens.
        pack_tails: whether tables share their last, partly filled extents.
    """

    queue: str | None = None
    policy: str = "lru"
    size: int | None = None
    pack_tails: bool = False

    def __str__(self) -> str:
        """The value of the variable that asks for this."""
        policy = "" if self.policy == "lru" else f":{self.policy}"
        size = "" if self.size is None else f",size={self.size}"
        return f"{self.queue}{policy}{size}" + (",pack_tails" if self.pack_tails else "")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variable; SettingsError, which lists what is allowed, for any other value."""
        value = environ.get(QUEUE_VARIABLE)
        if value is None:
            return cls()
        if value in ("python", "native"):
            return cls(queue=value)
        if value == "native:sorted":
            return cls(queue="native", policy="sorted")
        if extent := re.fullmatch("native:extent(?:,size=([1-9][0-9]{0,3}))?(,pack_tails)?", value):
            size = None if extent[1] is None else int(extent[1])
            if size is None or (size <= MAX_EXTENT_SIZE and size & (size - 1) == 0):
                packs = extent[2] is not None
                return cls(queue="native", policy="extent", size=size, pack_tails=packs)
        allowed = "; ".join(f"{name!r} ({meaning})" for name, meaning in QUEUES.items())
        raise SettingsError(
            f"{QUEUE_VARIABLE}={value!r} is not allowed. Allowed are {allowed}. "
            "Unset the variable to leave vLLM untouched."
        )
