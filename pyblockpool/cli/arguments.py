"""What the verbs read alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

# What argparse gives to add verbs to.
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def at_least(least: int) -> Callable[[str], int]:
    """A ``type`` of argparse: whole numbers from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return number
