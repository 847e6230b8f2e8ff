"""Pictures: what they show is what was figured out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_traces import FULL, WINDOW, header, request, reset, write
from matplotlib.colors import to_hex

from pyblockpool import plots
from pyblockpool.block_trace import read_sections
from pyblockpool.report import Choices, EngineFigures, engine_figures


def engine(path: Path, label: str, *rows: dict[str, Any], **changes: Any) -> EngineFigures:
    (section,) = read_sections(write(path / label, header(**changes), *rows))
    return engine_figures(section, label, Choices())


@pytest.fixture
def stock(tmp_path: Path) -> EngineFigures:
    return engine(
        tmp_path,
        "stock",
        request(range(1, 71), 70 * 16, prefill=0.020),
        reset(),
        request([90, 10, 50, 30], 64, prefill=0.040, hit=32),
        request([30, 31], 32, prefill=0.020),
        reset(),
        request([1, 3], 32, prefill=None),
    )


@pytest.fixture
def native(tmp_path: Path) -> EngineFigures:
    rows = [request([8, 9, 10], 33, prefill=0.010), reset(), request([8, 9], 32, prefill=0.012)]
    return engine(tmp_path, "native", *rows)


def parts(figure: Any) -> tuple[list[Any], list[Any]]:
    """The axes above, and those of the maps that are drawn."""
    above, below = figure.subfigs
    return above.axes, [axes for axes in below.axes if axes.axison]


def test_rounds(stock: EngineFigures, native: EngineFigures) -> None:
    figure = plots.picture([stock, native])
    panels, _ = parts(figure)
    assert [(axes.get_title(), axes.get_ylabel()) for axes in panels] == [
        ("blocks a run, in prompts", "blocks"),
        ("tile amplification, in prompts", "tiles touched / tiles if packed"),
        ("latency of prefill, mean", "ms"),
    ]
    assert {axes.get_xlabel() for axes in panels} == {"round"}
    drawn = [[line.get_xydata().tolist() for line in axes.lines[:2]] for axes in panels]
    assert drawn[0] == [[[1, 70], [2, 6 / 5], [3, 1]], [[1, 3], [2, 2]]]
    assert drawn[1] == [[[1, 1], [2, 5 / 2], [3, 1]], [[1, 1], [2, 1]]]
    latencies = drawn[2]
    assert latencies[0][:2] == [[1, pytest.approx(20)], [2, pytest.approx(30)]]
    assert math.isnan(latencies[0][2][1])
    (legend,) = figure.subfigs[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [" stock", " native"]
    for axes in panels:
        looks = {(line.get_color(), line.get_marker()) for line in axes.lines[:2]}
        assert len(looks) == 2


def test_scales(stock: EngineFigures, native: EngineFigures, tmp_path: Path) -> None:
    """Logarithmic where the largest value is more than 30 times the smallest, else from 0."""
    blocks, tiles, latency = parts(plots.picture([stock, native]))[0]
    assert [axes.get_yscale() for axes in (blocks, tiles, latency)] == ["log", "linear", "linear"]
    assert blocks.get_ylim()[0] > 0
    assert [axes.get_ylim()[0] for axes in (tiles, latency)] == [0, 0]
    rows = [request([8], 16), reset(), request(range(1, 31), 30 * 16)]
    blocks, *_ = parts(plots.picture([engine(tmp_path, "thirty", *rows)]))[0]
    assert (blocks.get_yscale(), blocks.get_ylim()[0]) == ("linear", 0)


def test_without_latencies_there_are_hits(tmp_path: Path) -> None:
    """As in a replay, whose whole tables are shown."""
    row = request([3, 4, 9], 32, hit=8, prefill=None)
    seen = engine(tmp_path, "replay", row, reset(), row)
    blocks, tiles, hits = parts(plots.picture([seen], "whole tables"))[0]
    assert blocks.get_title() == "blocks a run, in whole tables"
    assert blocks.lines[0].get_ydata().tolist() == [1.5, 1.5]
    assert tiles.lines[0].get_ydata().tolist() == [2.0, 2.0]
    assert (hits.get_title(), hits.get_ylabel()) == ("prefix hits", "% of prompt tokens")
    assert hits.lines[0].get_ydata().tolist() == [25.0, 25.0]


def test_the_largest_group_is_shown(tmp_path: Path) -> None:
    rows = [request([0, 0, 9], 48), request([3, 4, 5], 48, group=1)]
    for lines, drawn in ((rows, [[3, 0]]), ([*rows, reset(), *rows], [[1, 3], [2, 3]])):
        seen = engine(tmp_path, "hybrid", *lines, groups=[WINDOW, FULL])
        assert plots.largest_group(seen) == 1
        blocks, *_ = parts(plots.picture([seen]))[0]
        assert blocks.lines[0].get_xydata().tolist() == drawn


def test_one_round_is_a_point_an_engine(tmp_path: Path) -> None:
    engines = [
        engine(tmp_path, "stock", request([90, 10, 50, 30], 64, prefill=None)),
        engine(tmp_path, "native", request([8, 9, 10, 11], 64, prefill=0.010)),
    ]
    panels, maps = parts(plots.picture(engines))
    expected: list[list[float]] = [[1, 4], [4, 1], [math.nan, 10]]
    for axes, values in zip(panels, expected, strict=True):
        points = [line.get_xydata().tolist() for line in axes.lines[:2]]
        assert points == [
            [[pytest.approx(value, nan_ok=True), place]] for place, value in enumerate(values)
        ]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["stock", "native"]
    assert [note.get_text() for note in panels[1].texts] == ["4.00", "1.00"]
    assert [note.get_text() for note in panels[2].texts] == ["10.0"]
    assert [axes.get_title() for axes in maps] == ["stock", "native"]


def test_maps(stock: EngineFigures, native: EngineFigures) -> None:
    """A cell a block, in the colour of who held it last; the same scale for all engines."""
    _, maps = parts(plots.picture([stock, native]))
    titles = ["stock, round 1", "native, round 1", "stock, round 3", "native, round 2"]
    assert [axes.get_title() for axes in maps] == titles
    tables: list[list[int]] = [list(range(1, 71)), [8, 9, 10], [1, 3], [8, 9]]
    for axes, table in zip(maps, tables, strict=True):
        (image,) = axes.images
        cells = np.asarray(image.get_array())
        assert cells.shape == maps[0].images[0].get_array().shape
        width = cells.shape[1]
        assert image.get_extent() == [-0.5, width - 0.5, len(cells) - 0.5, -0.5]
        for block in range(91):
            colour = image.cmap(image.norm(cells[block // width, block % width]))
            expected = plots.REQUESTS[0] if block in table else plots.UNUSED
            assert to_hex(colour) == expected.lower(), (axes.get_title(), block)


@pytest.mark.parametrize("num_blocks", [1, 2, 8, 9, 65, 200, 241, 1000, 4097, 100_000])
def test_ticks_of_a_map_name_rows_and_columns(tmp_path: Path, num_blocks: int) -> None:
    """At the middle of a row the id of its first block: with the column, the id of any block."""
    last = num_blocks - 1
    seen = engine(tmp_path, "stock", request([last], 16), num_blocks=max(2, num_blocks))
    (axes,) = parts(plots.picture([seen]))[1]
    axes.figure.canvas.draw()
    height, width = axes.images[0].get_array().shape
    columns, rows = axes.get_xticks().tolist(), axes.get_yticks().tolist()
    assert rows[0] == columns[0] == 0
    assert set(rows) <= set(range(height))
    assert set(columns) <= set(range(width))
    assert min(height, 3) <= len(rows) <= 8
    assert len(columns) == 4
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"{row * width:,}" for row in rows]
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"{each}" for each in columns]


def test_neighbours_in_the_pool_differ(tmp_path: Path) -> None:
    """Requests that touch, beside or above each other; where the pool ends there is no colour."""
    rows = [request([number, number + 1], 32) for number in range(1, 116, 2)]
    rows += [request([number], 16) for number in (9, 23, 31, 110)]
    seen = engine(tmp_path, "stock", *rows, num_blocks=117)
    (axes,) = parts(plots.picture([seen]))[1]
    cells = axes.images[0].get_array()
    flat, width = cells.ravel(), cells.shape[1]
    holders = seen.last_holders.tolist()
    assert flat.mask.tolist() == [place > 116 for place in range(len(flat))]
    assert {holder for block, holder in enumerate(holders[:117]) if flat[block] == 0} == {-1}
    colours = flat.compressed().tolist()
    assert set(colours) == set(range(len(plots.REQUESTS) + 1))
    for block, holder in enumerate(holders[:117]):
        for beside in (block + 1, block + width):
            if beside < 117:
                assert (colours[block] == colours[beside]) == (holder == holders[beside])


def test_more_neighbours_than_colours(tmp_path: Path) -> None:
    """The one that touches them all still has one colour, and shares it with the fewest."""
    rows = [request(range(1, 60, 2), 30 * 16)]
    rows += [request([number], 16) for number in range(2, 61, 2)]
    seen = engine(tmp_path, "stock", *rows)
    (axes,) = parts(plots.picture([seen]))[1]
    cells = axes.images[0].get_array().ravel()
    assert len({int(cells[block]) for block in range(1, 60, 2)}) == 1
    assert all(cells[block] != cells[block + 1] for block in range(1, 60))


def test_the_title_of_the_maps_says_what_colour_does_not_show(stock: EngineFigures) -> None:
    (title,) = [text.get_text() for text in plots.picture([stock]).subfigs[1].texts]
    assert "where blocks lie, not in which order" in title
    assert "white: no block" in title


def test_many_engines_stand_below_each_other(tmp_path: Path) -> None:
    rows = [request([1, 2], 32), reset(), request([5], 9)]
    engines = [engine(tmp_path, f"engine-{number}", *rows) for number in range(9)]
    figure = plots.picture(engines)
    panels, maps = parts(figure)
    assert len(maps) == 18
    assert {axes.get_title() for axes in maps} == {
        f"{each.label}, round {number}" for each in engines for number in (1, 2)
    }
    looks = {(line.get_color(), line.get_marker()) for line in panels[0].lines}
    assert len(looks) == 9


def test_names_are_not_interpreted(tmp_path: Path) -> None:
    rows = [request([1, 2], 32), reset(), request([5], 9)]
    figure = plots.picture([engine(tmp_path, name, *rows) for name in ("_a", "$x_{y$")])
    plots.save(figure, tmp_path / "out.svg")
    drawn = (tmp_path / "out.svg").read_text()
    for text in (" _a<", " $x_{y$<", ">_a, round 1<", ">$x_{y$, round 2<"):
        assert text in drawn


@pytest.mark.parametrize(
    ("ending", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_files(tmp_path: Path, native: EngineFigures, ending: str, magic: bytes) -> None:
    out = tmp_path / f"out{ending}"
    plots.save(plots.picture([native]), out)
    assert out.read_bytes().startswith(magic)
    if ending == ".svg":
        assert "tile amplification, in prompts" in out.read_text()
