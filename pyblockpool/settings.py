"""The environment variable that switches pyblockpool on, parsed once into a frozen record.

One variable, because Ray passes on variables that begin with ``VLLM_`` and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyblockpool.errors import SettingsError

QUEUE_VARIABLE = "VLLM_BLOCK_QUEUE"

# What each value of the variable asks for.
QUEUES = {
    "python": "vLLM's own queue, with the order reset",
    "native": "pyblockpool's queue, policy lru: the same blocks in the same order",
}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        queue: a key of ``QUEUES``, or None when nothing is to be touched.
    """

    queue: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variable; SettingsError, which lists what is allowed, for any other value."""
        value = environ.get(QUEUE_VARIABLE)
        if value is None or value in QUEUES:
            return cls(queue=value)
        allowed = "; ".join(f"{name!r} ({meaning})" for name, meaning in QUEUES.items())
        raise SettingsError(
            f"{QUEUE_VARIABLE}={value!r} is not allowed. Allowed are {allowed}. "
            "Unset the variable to leave vLLM untouched."
        )
