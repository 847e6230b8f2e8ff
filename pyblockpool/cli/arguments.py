"""What the verbs read alike."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

# Endings of the files that a plot can be written to.
PICTURES = (".png", ".svg", ".pdf")

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


def add_plot(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--plot OUT``."""
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="OUT",
        help=f"draw {what} into a file, whose name ends in {', '.join(PICTURES)}, and say so on "
        "stderr; needs pyblockpool[plot]",
    )


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(PICTURES)}, unlike {text}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path
