"""What the verbs print alike."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement

# In columns: a pipe has no width, and nothing is cut there.
_PIPE = 1000


@dataclass(frozen=True)
class FirstThatFits:
    """Of several ways to show something, the first that the terminal is wide enough for.

    Attributes:
        ways: the best of them first; the last is taken where none fits.
    """

    ways: Callable[[], Iterable[RenderableType]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=_PIPE)
        way: RenderableType = ""
        for way in self.ways():
            if Measurement.get(console, unlimited, way).maximum <= options.max_width:
                break
        yield way


def show(*parts: RenderableType) -> None:
    """Print tables and text on stdout, as rich does: no colour with NO_COLOR or in a pipe."""
    width = None if sys.stdout.isatty() else _PIPE
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    for part in parts:
        console.print(part)
    sys.stdout.flush()


def show_json(found: dict[str, Any]) -> None:
    """Print it on stdout in one line."""
    print(json.dumps(found, allow_nan=False), flush=True)


def tell_plot(verb: str, path: Path) -> None:
    """Say that a picture was written; on stderr, as stdout may be JSON."""
    print(f"pyblockpool {verb}: the picture is in {path}", file=sys.stderr)


def counted(count: int, what: str) -> str:
    """A number of things."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def size(value: float) -> str:
    """A number of blocks or milliseconds, with a digit behind the point where it is small."""
    return number(value, ",.0f" if value >= 99.95 else ",.1f")


def number(value: float, style: str) -> str:
    """A figure in a table; a dash for what there is not."""
    return "-" if math.isnan(value) else format(value, style)
