"""The figures of block tables, against hand-made tables and plain definitions."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyblockpool.contiguity import Contiguity, num_runs, num_tiles


def table(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


def test_by_hand() -> None:
    assert (num_runs(table()), num_tiles(table(), 8)) == (0, 0)
    assert (num_runs(table(7)), num_tiles(table(7), 8)) == (1, 1)
    assert (num_runs(table(6, 7, 8, 9, 3)), num_tiles(table(6, 7, 8, 9, 3), 8)) == (2, 2)
    assert (num_runs(table(3, 2, 1)), num_tiles(table(3, 2, 1), 2)) == (3, 2)


def test_ratios() -> None:
    seen = Contiguity(tile=4)
    assert math.isnan(seen.blocks_per_run)
    assert math.isnan(seen.tile_amplification)
    seen.add(table(4, 5, 6, 7, 9))
    assert (seen.blocks_per_run, seen.mergeable_share, seen.tile_amplification) == (2.5, 0.75, 1.0)
    seen.add(table(12, 2, 30))
    assert seen.tile_amplification == (2 + 3) / (2 + 1)
    assert seen.mergeable_share == 3 / 6
    assert seen.tables == 2


@given(st.lists(st.integers(0, 100)), st.sampled_from([1, 2, 8, 64]))
def test_as_defined(ids: list[int], tile: int) -> None:
    runs = sum(i == 0 or ids[i] != ids[i - 1] + 1 for i in range(len(ids)))
    assert num_runs(table(*ids)) == runs
    assert num_tiles(table(*ids), tile) == len({block_id // tile for block_id in ids})
