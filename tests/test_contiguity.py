"""The figures of block tables, against hand-made tables and slow plain definitions."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyblockpool
from pyblockpool import _contiguity
from pyblockpool.contiguity import MAX_ID, Contiguity, Copies

Ids = list[int]


def seen(*tables: Any, tile: int = 8) -> Contiguity:
    contiguity = Contiguity(tile)
    for table in tables:
        contiguity.add(table)
    return contiguity


def copied(source: Any, destination: Any) -> Copies:
    copies = Copies()
    copies.add(source, destination)
    return copies


# Slow and plain: lists of lists, and the fewest pieces by trying them all.


def stretches(table: Ids) -> list[Ids]:
    """The blocks between two null positions."""
    found: list[Ids] = [[]]
    for block_id in table:
        if block_id == 0:
            found.append([])
        else:
            found[-1].append(block_id)
    return [stretch for stretch in found if stretch]


def steps(piece: Ids) -> set[int]:
    return {after - before for before, after in pairwise(piece)}


def fewest_pieces(length: int, is_piece: Callable[[int, int], bool]) -> int:
    fewest = [0]
    for end in range(1, length + 1):
        fewest.append(1 + min(fewest[begin] for begin in range(end) if is_piece(begin, end)))
    return fewest[length]


def longest_piece(length: int, is_piece: Callable[[int, int], bool]) -> int:
    return max(
        (end - begin for end in range(length + 1) for begin in range(end) if is_piece(begin, end)),
        default=0,
    )


def defined(table: Ids, tile: int) -> Contiguity:
    found = Contiguity(tile, tables=1)
    for stretch in stretches(table):

        def rises(begin: int, end: int, stretch: Ids = stretch) -> bool:
            return steps(stretch[begin:end]) <= {1}

        def rises_or_falls(begin: int, end: int, stretch: Ids = stretch) -> bool:
            return steps(stretch[begin:end]) in ({1}, {-1}, set())

        found.blocks += len(stretch)
        found.neighbours += len(stretch) - 1
        found.runs += fewest_pieces(len(stretch), rises)
        found.runs_either += fewest_pieces(len(stretch), rises_or_falls)
        found.longest_run = max(found.longest_run, longest_piece(len(stretch), rises))
    blocks = [block_id for block_id in table if block_id]
    found.tiles = len({block_id // tile for block_id in blocks})
    found.packed_tiles = math.ceil(len(blocks) / tile)
    found.highest_id = max(blocks, default=-1)
    return found


def defined_copy(source: Ids, destination: Ids) -> Copies:
    def rises(begin: int, end: int) -> bool:
        return steps(source[begin:end]) | steps(destination[begin:end]) <= {1}

    def rises_or_falls(begin: int, end: int) -> bool:
        common = steps(source[begin:end]) | steps(destination[begin:end])
        return common in ({1}, {-1}, set())

    length = len(source)
    return Copies(
        tables=1,
        blocks=length,
        neighbours=max(0, length - 1),
        runs=fewest_pieces(length, rises),
        runs_either=fewest_pieces(length, rises_or_falls),
        longest_run=longest_piece(length, rises),
    )


@st.composite
def tables(draw: st.DrawFn, highest: int = MAX_ID, length: int = 40) -> Ids:
    """Stretches that rise, fall, stand still and jump, and null positions."""
    table: Ids = []
    while len(table) < length and draw(st.integers(0, 8)):
        first = draw(st.one_of(st.integers(0, min(60, highest)), st.integers(0, highest)))
        step = draw(st.sampled_from([1, 1, 1, -1, -1, 0, 2, 7]))
        many = draw(st.integers(1, 9))
        table += [i for k in range(many) if 0 <= (i := first + k * step) <= highest]
    return table[:length]


TILES = st.one_of(st.sampled_from([1, 2, 7, 8, 64, MAX_ID]), st.integers(1, MAX_ID))


def test_by_hand() -> None:
    def figures(*table: int, tile: int = 8) -> tuple[int, ...]:
        found = seen(table, tile=tile)
        assert found == defined(list(table), tile)
        return (
            *(found.blocks, found.neighbours, found.runs, found.runs_either, found.longest_run),
            *(found.tiles, found.packed_tiles, found.highest_id),
        )

    #                                                 neighbours, either way, tiles,  highest
    assert figures() == (0, 0, 0, 0, 0, 0, 0, -1)
    assert figures(7) == (1, 0, 1, 1, 1, 1, 1, 7)
    assert figures(6, 7, 8, 9, 3) == (5, 4, 2, 2, 4, 2, 1, 9)
    assert figures(3, 2, 1, tile=2) == (3, 2, 3, 1, 1, 2, 2, 3)
    # The direction turns: 4 begins a run, and may be the first of one that falls.
    assert figures(4, 5, 4, 3) == (4, 3, 3, 2, 2, 1, 1, 5)
    assert figures(5, 5, 6) == (3, 2, 2, 2, 2, 1, 1, 6)
    # Positions that are not kept are no blocks, and no run goes on across them.
    assert figures(0, 0, 0) == (0, 0, 0, 0, 0, 0, 0, -1)
    assert figures(0, 0, 1, 2) == (2, 1, 1, 1, 2, 1, 1, 2)
    assert figures(1, 0, 2) == (2, 0, 2, 2, 1, 1, 1, 2)
    assert figures(MAX_ID, 1, tile=MAX_ID) == (2, 1, 2, 2, 1, 2, 1, MAX_ID)
    assert figures(MAX_ID - 1, MAX_ID, tile=1) == (2, 1, 1, 1, 2, 2, 2, MAX_ID)


def test_ratios() -> None:
    contiguity = seen((4, 5, 6, 7, 9), tile=4)
    assert contiguity.blocks_per_run == 2.5
    assert (contiguity.mergeable_share, contiguity.mergeable_share_either) == (0.75, 0.75)
    assert contiguity.tile_amplification == 1
    assert contiguity.high_water_ratio == 10 / 5
    contiguity.add((12, 3, 2))
    assert contiguity.tile_amplification == (2 + 2) / (2 + 1)
    assert contiguity.mergeable_share == 3 / 6
    assert contiguity.mergeable_share_either == 4 / 6
    assert contiguity.high_water_ratio == 13 / 8
    assert (contiguity.tables, contiguity.longest_run) == (2, 4)


RATIOS = ["blocks_per_run", "mergeable_share", "mergeable_share_either"]
TABLE_RATIOS = [*RATIOS, "tile_amplification", "high_water_ratio"]


@pytest.mark.parametrize("table", [[], [0, 0]])
def test_where_there_is_nothing_ratios_are_nan(table: Ids) -> None:
    for contiguity in (Contiguity(8), seen(table)):
        for name in TABLE_RATIOS:
            assert math.isnan(getattr(contiguity, name)), name
        assert contiguity.descriptors(2) == 0
    for name in RATIOS:
        assert math.isnan(getattr(copied([], []), name)), name
    single = seen([5])
    assert math.isnan(single.mergeable_share)
    assert math.isnan(single.mergeable_share_either)


def test_a_table_without_blocks_changes_no_ratio() -> None:
    some, same = seen([1, 2, 5], [9]), seen([], [1, 2, 5], [0], [9], [])
    assert (some.tables, same.tables) == (2, 5)
    for name in TABLE_RATIOS:
        assert getattr(some, name) == getattr(same, name), name


@given(tables(), TILES)
def test_a_table_as_defined(table: Ids, tile: int) -> None:
    assert seen(table, tile=tile) == defined(table, tile)


@given(st.lists(st.integers(1, 5000), max_size=300, unique=True), TILES)
def test_blocks_that_occur_once(table: Ids, tile: int) -> None:
    """As those of a request: then no run turns, and only the distance of neighbours counts."""
    found = seen(table, tile=tile)
    assert found.tiles == len({block_id // tile for block_id in table})
    if len(table) > 1:
        beside = sum(abs(after - before) == 1 for before, after in pairwise(table))
        assert found.mergeable_share_either == beside / (len(table) - 1)
    assert seen(sorted(table)).runs == seen(sorted(table)).runs_either


@given(st.lists(tables(), max_size=8), TILES)
def test_a_trace_is_the_sum_of_its_tables(trace: list[Ids], tile: int) -> None:
    one_by_one = seen(*trace, tile=tile)
    at_once = Contiguity(tile)
    at_once.add_all(iter(trace[:3]))
    at_once.add_all(np.array(table) for table in trace[3:])
    assert at_once == one_by_one
    each = [defined(table, tile) for table in trace]
    for name, value in asdict(one_by_one).items():
        if name in ("longest_run", "highest_id"):
            assert value == max((getattr(one, name) for one in each), default=value), name
        elif name != "tile":
            assert value == sum(getattr(one, name) for one in each), name


@given(st.lists(st.tuples(*[st.integers(0, 9) | st.integers(0, MAX_ID)] * 2), max_size=40))
def test_a_copy_as_defined(pairs: list[tuple[int, int]]) -> None:
    source, destination = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert copied(source, destination) == defined_copy(source, destination)


@given(tables(highest=MAX_ID - 30), st.integers(0, 30), st.data())
def test_a_copy_merges_where_both_sides_advance(table: Ids, away: int, data: st.DataObject) -> None:
    moved = [block_id + away for block_id in table]
    assert copied(table, moved) == copied(moved, table) == defined_copy(table, moved)
    at = data.draw(st.integers(0, len(moved)))
    other = moved[:at] + data.draw(tables(length=5)) + moved[at:]
    other = other[: len(table)]
    assert copied(table, other) == copied(other, table) == defined_copy(table, other)


def test_copies_by_hand() -> None:
    merged = copied([5, 6, 7, 8], [1, 2, 3, 4])
    assert (merged.runs, merged.longest_run, merged.mergeable_share) == (1, 4, 1)
    for destination, either in (([1, 2, 9, 3], 3), ([4, 3, 2, 1], 4), ([2, 2, 3, 3], 3)):
        halting = copied([5, 6, 7, 8], destination)
        assert halting.runs == halting.runs_either == either
    falling = copied([8, 7, 6, 5], [4, 3, 2, 1])
    assert (falling.runs, falling.runs_either, falling.mergeable_share_either) == (4, 1, 1)
    # Block 0 of a memory that has no null block.
    assert copied([0, 1], [0, 1]).runs == 1
    falling.add([1, 2], [11, 12])
    assert (falling.tables, falling.blocks, falling.runs, falling.longest_run) == (2, 6, 5, 2)
    assert falling.descriptors(3) == 15


SAME_TABLES: dict[str, Any] = {
    "list": [3, 4, 9],
    "tuple": (3, 4, 9),
    "range": range(3, 5),
    "int64": np.array([3, 4, 9]),
    "uint8": np.array([3, 4, 9], np.uint8),
    "uint64": np.array([3, 4, 9], np.uint64),
    "other byte order": np.array([3, 4, 9], ">i4"),
    "every second": np.array([3, 0, 4, 0, 9], np.int32)[::2],
    "backwards": np.array([9, 4, 3], np.int32)[::-1],
    "column": np.array([[3, 0], [4, 0], [9, 0]], np.int32)[:, 0],
    "NumPy ints": [np.int64(3), np.int8(4), np.uint16(9)],
    "highest id": [MAX_ID],
    "empty list": [],
    "empty array": np.array([]),
}


@pytest.mark.parametrize("table", SAME_TABLES.values(), ids=SAME_TABLES)
def test_what_converts_safely(table: Any) -> None:
    plain = [int(block_id) for block_id in table]
    assert seen(table) == seen(np.array(plain, np.int32)) == defined(plain, 8)
    assert copied(table, table) == defined_copy(plain, plain)
    at_once = Contiguity(8)
    at_once.add_all([table])
    assert at_once == seen(table)


def test_tables_are_only_read() -> None:
    table = np.array([5, 1, 2], np.int32)
    table.flags.writeable = False
    references = sys.getrefcount(table)
    for _ in range(20):
        seen(table)
        copied(table, table)
        with pytest.raises(ValueError, match="for each source"):
            copied(table, table[:2])
    assert sys.getrefcount(table) == references
    assert table.tolist() == [5, 1, 2]


class Block:
    block_id = 7


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "too large": ([1, 2**31], ValueError, "go from 0 to 2147483647, not 2147483648"),
    "wraps to 5": ([2**32 + 5], ValueError, "not 4294967301"),
    "wraps to 5 from below": ([-(2**32) + 5], ValueError, "not -4294967291"),
    "larger than int64": ([2**64 - 1], ValueError, "not 18446744073709551615"),
    "larger than any": ([2**70], TypeError, "integers from 0 to 2147483647"),
    "uint32": (np.array([2**32 - 1], np.uint32), ValueError, "not 4294967295"),
    "padded": ([4, 5, -1], ValueError, "not -1: leave out what pads the table"),
    "padded int32": (
        np.array([4, 5, -1], np.int32),
        ValueError,
        r"not -1: leave .* \(position 2\)",
    ),
    "lowest": (np.array([1, 2, -(2**31)], np.int32), ValueError, "not -2147483648"),
    "floats": ([1.0, 2.0], TypeError, "not float64: convert them"),
    "bools": ([True], TypeError, "not bool"),
    "texts": (["1"], TypeError, "not <U1"),
    "blocks": ([Block(), Block()], TypeError, "of blocks, pass block_id"),
    "one id": (5, TypeError, "a sequence of block ids, not int"),
    "nothing": (None, TypeError, "not NoneType"),
    "set": ({1, 2}, TypeError, "not set"),
    "text": ("123", TypeError, "not str"),
    "table in a table": (
        [[1, 2]],
        ValueError,
        r"not the shape \(1, 2\): pass tables one at a time",
    ),
    "by group": (([1, 2], [3]), ValueError, "not lists in lists: pass tables one at a time"),
    "no tables": (np.empty((0, 4), np.int32), ValueError, r"not the shape \(0, 4\)"),
}


@pytest.mark.parametrize(("table", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_change_nothing(table: Any, error: type[Exception], message: str) -> None:
    good = [3, 4, 9]
    contiguity, copies = seen(good), copied(good, good)
    before = (asdict(contiguity), asdict(copies))
    calls: list[Callable[[], None]] = [
        lambda: contiguity.add(table),
        lambda: contiguity.add_all([good, table]),
        lambda: copies.add(table, good),
        lambda: copies.add(good, table),
    ]
    for call in calls:
        with pytest.raises(error, match=message):
            call()
    assert (asdict(contiguity), asdict(copies)) == before


def test_sides_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="a destination for each source, not 2 for 3"):
        copied([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="not 1 for 0"):
        copied([], [1])


def test_a_tile_has_blocks() -> None:
    for tile in (0, -8, 2**31):
        with pytest.raises(ValueError, match=f"1 to 2147483647 blocks, not {tile}"):
            Contiguity(tile)
    for wrong in (8.0, "8", None):
        with pytest.raises(TypeError, match="integer"):
            Contiguity(wrong)  # type: ignore[arg-type]
    assert type(Contiguity(np.int64(8)).tile) is int  # type: ignore[arg-type]
    changed = Contiguity(8)
    changed.tile = 0
    with pytest.raises(ValueError, match="at least one block"):
        changed.add([1])


def test_descriptors() -> None:
    """vllm-project/vllm#55434: one for each run in each region."""
    scattered = seen(range(2, 204, 2))
    assert scattered.runs == 101
    assert scattered.descriptors(1) == 101
    assert scattered.descriptors(101) == 101 * 101
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"at least one region, not {wrong}"):
            scattered.descriptors(wrong)
    with pytest.raises(TypeError, match="integer"):
        scattered.descriptors(1.5)  # type: ignore[arg-type]


WRONG_ARRAYS: dict[str, Any] = {
    "int64": np.array([2**32 + 5]),
    "uint32": np.array([5], np.uint32),
    "floats": np.array([5.0]),
    "every second": np.arange(8, dtype=np.int32)[::2],
    "other byte order": np.array([5], ">i4"),
    "list": [5],
    "nothing": None,
}


@pytest.mark.parametrize("ids", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_the_compiled_module_converts_nothing(ids: Any) -> None:
    good, lengths = np.array([5], np.int32), np.array([1])
    for call in (
        lambda: _contiguity.table_figures(ids, 8),
        lambda: _contiguity.trace_figures(ids, lengths, 8),
        lambda: _contiguity.copy_figures(ids, good),
        lambda: _contiguity.copy_figures(good, ids),
    ):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call()


def test_the_compiled_module_looks_at_shapes_and_lengths() -> None:
    good = np.array([5, 6], np.int32)
    for wrong in (good.reshape(2, 1), good[:1].reshape(())):
        for call in (
            lambda wrong=wrong: _contiguity.table_figures(wrong, 8),
            lambda wrong=wrong: _contiguity.copy_figures(good, wrong),
        ):
            with pytest.raises(ValueError, match="one dimension"):
                call()
    with pytest.raises(ValueError, match="one dimension"):
        _contiguity.trace_figures(good, np.array([[2]]), 8)
    for lengths in ([], [1], [3], [2, -1], [1, -1, 2], [2, 1], [-(2**63)]):
        with pytest.raises(ValueError, match="do not make up"):
            _contiguity.trace_figures(good, np.array(lengths, np.int64), 8)
    with pytest.raises(TypeError):
        _contiguity.trace_figures(good, np.array([2], np.int32), 8)


def test_long_tables_in_several_threads() -> None:
    """Long enough for the compiled module to let go of the GIL."""
    order = np.random.default_rng(40244).permutation(np.arange(1, 100_001, dtype=np.int32))
    expected = seen(order)
    assert expected.tiles == 12_501
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (seen(order), copied(order, order)), range(20)))
        at_once = Contiguity(8)
        pool.submit(at_once.add_all, [order] * 5).result()
        refused = pool.submit(seen, np.full(10_000, -1, np.int32))
        assert isinstance(refused.exception(), ValueError)
    assert all(table == expected and copy.runs == expected.runs for table, copy in found)
    assert at_once.tiles == 5 * 12_501


def test_without_the_compiled_module(tmp_path: Path) -> None:
    shutil.copytree(
        Path(pyblockpool.__file__).parent,
        tmp_path / "pyblockpool",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    ran = subprocess.run(
        [sys.executable, "-c", "import pyblockpool.contiguity"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "NotCompiledError: the compiled module pyblockpool._contiguity" in ran.stderr
    assert "install pyblockpool from a wheel" in ran.stderr


def test_the_package_has_the_module_and_its_types() -> None:
    folder = Path(_contiguity.__file__).parent
    names = {path.name for path in folder.iterdir()}
    assert {"_contiguity.pyi", "contiguity.py"} <= names
    assert not names & {"contiguity.cpp", "contiguity.hpp"}


@pytest.mark.skipif("PYBLOCKPOOL_SANITIZED" not in os.environ, reason="not a sanitizer run")
def test_the_sanitized_module_is_the_one_under_test() -> None:
    expected = Path(os.environ["PYBLOCKPOOL_SANITIZED"]).resolve()
    assert Path(_contiguity.__file__).is_relative_to(expected)
    assert b"__ubsan" in Path(_contiguity.__file__).read_bytes()
