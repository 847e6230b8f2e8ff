"""Block tables -> figures of contiguity.

A table is a one-dimensional array of block ids (int32) in the order of the request's tokens. A
*run* is a maximal stretch of a table in which each id is the one before it plus 1; a *tile* is an
aligned group of neighbouring blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Table: TypeAlias = npt.NDArray[np.int32]


def num_runs(table: Table) -> int:
    """Runs in the table; 0 for an empty one."""
    return int(np.count_nonzero(np.diff(table) != 1)) + 1 if len(table) else 0


def num_tiles(table: Table, tile: int) -> int:
    """Distinct tiles of ``tile`` blocks that the table touches."""
    return len(np.unique(table // tile))


@dataclass
class Contiguity:
    """Sums over tables, and the ratios they make; nan where there was nothing to look at.

    Attributes:
        tile: blocks in a tile.
        tables: number of tables.
        blocks, runs: in all of them.
        tiles: that they touch, each table by itself.
        packed_tiles: that they would touch if their blocks were packed.
    """

    tile: int
    tables: int = 0
    blocks: int = 0
    runs: int = 0
    tiles: int = 0
    packed_tiles: int = 0

    def add(self, table: Table) -> None:
        self.tables += 1
        self.blocks += len(table)
        self.runs += num_runs(table)
        self.tiles += num_tiles(table, self.tile)
        self.packed_tiles += -(-len(table) // self.tile)

    @property
    def blocks_per_run(self) -> float:
        return _ratio(self.blocks, self.runs)

    @property
    def mergeable_share(self) -> float:
        """Neighbours in a table that continue a run, over all neighbours."""
        return _ratio(self.blocks - self.runs, self.blocks - self.tables)

    @property
    def tile_amplification(self) -> float:
        """Tiles that are touched, over those that packed tables would touch."""
        return _ratio(self.tiles, self.packed_tiles)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
