"""What the verbs read alike."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import TypeAlias

# What argparse gives to add verbs to.
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_verb(
    verbs: Verbs, name: str, *, summary: str, description: str, example: str
) -> argparse.ArgumentParser:
    """Add a verb whose help ends in an example: a line that a shell takes as it stands."""
    return verbs.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, 80),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least(least: int) -> Callable[[str], int]:
    """A ``type`` of argparse: whole numbers from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return number
