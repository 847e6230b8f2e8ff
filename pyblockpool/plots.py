"""Figures of engines -> a picture: their rounds, and maps of their pools.

Needs matplotlib: ``pip install 'pyblockpool[plot]'``. The colours are those of Okabe and Ito (Color
Universal Design, 2008), which colour-blind people can tell apart, and each line has its marker.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pyblockpool.contiguity import Contiguity, Table
from pyblockpool.errors import MissingExtraError
from pyblockpool.report import EngineFigures, Figures, GroupFigures

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingExtraError(
        f"a plot needs matplotlib ({error}): pip install 'pyblockpool[plot]'"
    ) from error

# Engines whose maps stand beside each other; more of them stand below.
_COLUMNS = 4

# Ticks of a map for the ids of its rows, at most.
_TICKS = 8

# Between the smallest and the largest value of a panel: from here on its scale is logarithmic.
_FACTOR = 30

_BLUE, _VERMILLION, _GREEN, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
_PURPLE, _SKY, _BLACK, _YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
_LINES = (_BLUE, _VERMILLION, _GREEN, _ORANGE, _PURPLE, _SKY, _BLACK)
_MARKERS = "osD^vPX"
REQUESTS = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _VERMILLION, _YELLOW)
UNUSED = "#E8E8E8"

# Indices of colours; masked where there is no block.
Cells: TypeAlias = "np.ma.MaskedArray[Any, np.dtype[np.int32]]"

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name of a file with two dollars is no formula
}


@dataclass(frozen=True)
class Panel:
    """A figure, of each round or in all.

    Attributes:
        title: what it is.
        unit: label of its axis.
        style: how a value is written.
        value: of the figures and the index of a KV-cache group; nan where there is none.
        best: a value to compare with, None if there is no such.
    """

    title: str
    unit: str
    style: str
    value: Callable[[Figures, int], float]
    best: float | None = None


_LATENCY = Panel(
    "latency of prefill, mean", "ms", ",.1f", lambda figures, group: figures.prefill_ms
)
_HITS = Panel(
    "prefix hits", "% of prompt tokens", ".2f", lambda figures, group: 100 * figures.hit_rate
)

# The parts of tables that can be shown.
PARTS: dict[str, Callable[[GroupFigures], Contiguity]] = {
    "prompts": lambda group: group.prompts.contiguity,
    "whole tables": lambda group: group.tables.contiguity,
}


def panels(engines: Sequence[EngineFigures], part: str = "prompts") -> list[Panel]:
    """Blocks a run, tile amplification, and latencies where there are any, else prefix hits."""
    of = PARTS[part]
    return [
        Panel(
            f"blocks a run, in {part}",
            "blocks",
            ",.1f",
            lambda figures, group: of(figures.groups[group]).blocks_per_run,
        ),
        Panel(
            f"tile amplification, in {part}",
            "tiles touched / tiles if packed",
            ".2f",
            lambda figures, group: of(figures.groups[group]).tile_amplification,
            best=1.0,
        ),
        _LATENCY if any(engine.all.prefill for engine in engines) else _HITS,
    ]


def picture(engines: Sequence[EngineFigures], part: str = "prompts") -> Figure:
    """Rounds above, maps of the pools below, the engines beside each other.

    The rounds are those of the KV-cache group with the most blocks. A map has a cell for each block
    of the pool, in a colour of the request that was the last in the round to hold it;
    requests whose blocks touch differ, as far as there are colours for it. Of more
    than one round, the first and the last are mapped.

    Args:
        engines: with a round at least, each.
        part: of the tables, one of PARTS.
    """
    has_rounds = any(len(engine.rounds) > 1 for engine in engines)
    num_maps = 2 if has_rounds else 1
    map_rows = num_maps * -(-len(engines) // _COLUMNS)
    heights = (3.4 if has_rounds else 1.8 + 0.5 * len(engines), 0.7 + 2.6 * map_rows)
    with rc_context(_STYLE):
        figure = Figure(figsize=(11, sum(heights)), layout="constrained")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights).flat
        draw = _draw_rounds if has_rounds else _draw_points
        draw(above, panels(engines, part), engines)
        _draw_maps(below, engines, num_maps)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the picture, in the format that the ending of the file tells.

    Raises:
        ValueError: matplotlib has no such format.
        OSError: the file cannot be written.
    """
    with rc_context(_STYLE):
        figure.savefig(path, dpi=150)


def largest_group(engine: EngineFigures) -> int:
    """Index of the KV-cache group whose tables have the most blocks."""
    groups = engine.all.groups
    return max(range(len(groups)), key=lambda index: groups[index].tables.contiguity.blocks)


def _look(place: int) -> tuple[str, str]:
    """Colour and marker of an engine, together its own."""
    turn, colour = divmod(place, len(_LINES))
    return _LINES[colour], _MARKERS[(colour + turn) % len(_MARKERS)]


def _draw_rounds(
    figure: SubFigure, panels: Sequence[Panel], engines: Sequence[EngineFigures]
) -> None:
    """A line an engine; where lines lie on each other, the one below is the thicker one."""
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        lines = [
            [panel.value(figures, largest_group(engine)) for figures in engine.rounds]
            for engine in engines
        ]
        for place, (engine, values) in enumerate(zip(engines, lines, strict=True)):
            colour, marker = _look(place)
            above_it = (len(engines) - 1 - place) / len(engines)
            axes.plot(
                range(1, len(values) + 1),
                values,
                label=f" {engine.label}",  # matplotlib leaves out what begins with _
                color=colour,
                marker=marker if len(values) <= 50 else "",
                markersize=4 + 7 * above_it,
                linewidth=1.2 + 4 * above_it,
            )
        axes.set(title=panel.title, xlabel="round", ylabel=panel.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _scale(axes, "y", itertools.chain(*lines))
        if panel.best is not None:
            axes.axhline(panel.best, color=_BLACK, linestyle=":", linewidth=1)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4)


def _draw_points(
    figure: SubFigure, panels: Sequence[Panel], engines: Sequence[EngineFigures]
) -> None:
    """A row an engine; the value stands above its point."""
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        values = [panel.value(engine.all, largest_group(engine)) for engine in engines]
        for place, value in enumerate(values):
            colour, marker = _look(place)
            axes.plot([value], [place], linestyle="", color=colour, marker=marker, markersize=8)
            if not math.isnan(value):
                axes.annotate(
                    format(value, panel.style),
                    (value, place),
                    (0, 7),
                    textcoords="offset points",
                    ha="center",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )
        axes.set(title=panel.title, xlabel=panel.unit, ylim=(len(engines) - 0.4, -0.8))
        axes.set_yticks(range(len(engines)), [engine.label for engine in engines])
        _scale(axes, "x", values)
        if panel.best is not None:
            axes.axvline(panel.best, color=_BLACK, linestyle=":", linewidth=1)


def _scale(axes: Axes, which: str, values: Iterable[float]) -> None:
    """From 0, or logarithmic where small values would not be seen beside large ones."""
    seen = [value for value in values if not math.isnan(value)]
    low, high = min(seen, default=0.0), max(seen, default=1.0) or 1.0
    if 0 < low < high / _FACTOR:
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 2, high * 2)})
        getattr(axes, f"{which}axis").set_major_formatter("{x:,g}")
    else:
        axes.set(**{f"{which}lim": (0, 1.12 * high)})


def _draw_maps(figure: SubFigure, engines: Sequence[EngineFigures], num_maps: int) -> None:
    """In each column of the page an engine; below its first round, its last."""
    highest = max(engine.all.highest_block for engine in engines)
    columns = min(len(engines), _COLUMNS)
    width = _row_width(highest + 1, aspect=2.4 / columns)
    height = -(-(highest + 1) // width)
    colours = ListedColormap([UNUSED, *REQUESTS])
    rows = num_maps * -(-len(engines) // columns)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    # A tick stands at the middle of a row or column that exists. Steps are powers of two, as widths
    # are, for round ids.
    first_ids = range(0, height * width, width << max(0, math.ceil(math.log2(height / _TICKS))))
    for axes in grid.flat:
        axes.axis("off")
    for place, engine in enumerate(engines):
        maps = [(1, engine.first_holders), (len(engine.rounds), engine.last_holders)]
        for below, (number, holders) in enumerate(maps[-num_maps:]):
            row, column = num_maps * (place // columns) + below, place % columns
            axes = grid[row, column]
            axes.axis("on")
            axes.grid(visible=False)
            axes.imshow(
                _folded(holders, width, height),
                cmap=colours,
                vmin=0,
                vmax=colours.N - 1,
                aspect="auto",
                interpolation="nearest",
            )
            title = f"{engine.label}, round {number}" if num_maps > 1 else engine.label
            axes.set_title(textwrap.fill(title, 32))
            axes.set_xticks(range(0, width, width // 4))
            axes.set_yticks(
                [each // width for each in first_ids], [f"{each:,}" for each in first_ids]
            )
            if row == rows - 1:
                axes.set_xlabel("block in its row")
            if column == 0:
                axes.set_ylabel("first block id of a row")
    when = " in the round" if num_maps > 1 else ""
    figure.suptitle(
        f"pool: each block in the colour of the request that held it last{when}; requests that\n"
        f"touch differ, as far as {len(REQUESTS)} colours go; grey: in no table, white: no block\n"
        "colours show where blocks lie, not in which order: descending is as neat as ascending",
        fontsize=10,
    )


def _row_width(num_blocks: int, aspect: float) -> int:
    """Blocks in a row of the map, a power of two, for cells that are about square."""
    return 1 << max(3, round(math.log2(math.sqrt(num_blocks * aspect))))


def _folded(holders: Table, width: int, height: int) -> Cells:
    """Indices of colours, shape (height, width): 0 nobody, else a request; masked: no block."""
    inside = holders[: height * width]
    colours = np.zeros((height, width), np.int32)
    colours.flat[: len(inside)] = _colours(inside, width)
    beyond = np.arange(colours.size).reshape(height, width) >= len(inside)
    masked: Cells = np.ma.masked_where(beyond, colours)  # type: ignore[no-untyped-call]
    return masked


def _colours(holders: Table, width: int) -> Table:
    """For each block a number from 1 on, 0 for nobody.

    A request has one colour. Where it can be, it differs from those of the requests whose blocks
    touch its own, beside, above or below; where a request touches too many others, from those that
    it touches most.
    """
    touching: dict[int, Counter[int]] = defaultdict(Counter)
    for distance in (1, width):
        pairs = zip(holders[:-distance].tolist(), holders[distance:].tolist(), strict=True)
        for (one, other), times in Counter(pairs).items():
            if one != other and min(one, other) >= 0:
                touching[one][other] += times
                touching[other][one] += times
    requests = np.unique(holders[holders >= 0]).tolist()
    colour_of: dict[int, int] = {}
    for place, request in enumerate(sorted(requests, key=lambda each: -len(touching[each]))):
        taken = [0] * len(REQUESTS)
        for other, times in touching[request].items():
            if other in colour_of:
                taken[colour_of[other] - 1] += times
        # From another colour on each time, so that all of them are used.
        turn = [(place + step) % len(REQUESTS) for step in range(len(REQUESTS))]
        colour_of[request] = 1 + min(turn, key=taken.__getitem__)
    found: Table = np.zeros(len(holders), np.int32)
    if requests:
        palette = np.array([colour_of[each] for each in requests], np.int32)
        held = holders >= 0
        found[held] = palette[np.searchsorted(requests, holders[held])]
    return found
