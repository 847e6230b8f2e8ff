"""Block tables -> figures of contiguity.

A *table* is the block ids of a request in the order of its tokens, in one KV-cache group: an array
of shape ``(positions,)``. Its *blocks* are the positions with an id above 0; id 0 is vLLM's null
block, which stands for positions that are not kept (outside a sliding window, say). Nothing is read
or copied there, so a null position counts as no block, and no run goes on across it.

*Neighbours* are two blocks with nothing between them in the table. A *run* is a maximal stretch of
neighbours in which each id is the one before it plus 1. A run *in either direction* may instead
fall by 1 throughout; where the direction turns, the next block begins a run, and so does a block
that follows itself. So copies are merged: of ascending ids by NIXL (vllm-project/vllm#55841, where
the mergeable share comes from), in both directions by the copies of vllm-project/vllm#56110.

A *tile* of T blocks is the ids kT to kT+T-1: what a kernel that tiles the physical cache loads at
once. PyTorch's FlexAttention tiles by 128 tokens, which are 8 blocks of 16, unless it is told
otherwise (the default ``BLOCK_SIZE`` of ``torch.nn.attention.flex_attention.create_block_mask``).
RFC vllm-project/vllm#40244 reports a prefill that gets slower as ids scatter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pyblockpool.errors import INSTALL_REMEDY, NotCompiledError

try:
    from pyblockpool import _contiguity
except ImportError as error:
    raise NotCompiledError(
        f"the compiled module pyblockpool._contiguity does not load ({error}): {INSTALL_REMEDY}"
    ) from error

Table: TypeAlias = npt.NDArray[np.int32]

MAX_ID = 2**31 - 1


@dataclass(kw_only=True)
class Runs:
    """Sums over tables, and the ratios they make; nan where there was nothing to look at.

    Attributes:
        tables: number of tables, those without a block included.
        blocks: in all of them.
        neighbours: pairs of blocks with nothing between them.
        runs: in all tables.
        runs_either: the same, of runs in either direction.
        longest_run: blocks in the longest run of all, 0 if there is none.
    """

    tables: int = 0
    blocks: int = 0
    neighbours: int = 0
    runs: int = 0
    runs_either: int = 0
    longest_run: int = 0

    @property
    def blocks_per_run(self) -> float:
        return _ratio(self.blocks, self.runs)

    @property
    def mergeable_share(self) -> float:
        """Neighbours that continue a run, over all neighbours: 0 to 1."""
        return _ratio(self.blocks - self.runs, self.neighbours)

    @property
    def mergeable_share_either(self) -> float:
        """Neighbours that continue a run in either direction, over all neighbours: 0 to 1."""
        return _ratio(self.blocks - self.runs_either, self.neighbours)

    def descriptors(self, regions: int) -> int:
        """Copies that it takes to move all blocks, if each run of each region is one.

        So vllm-project/vllm#55434 counts the descriptors of NIXL: new blocks in one run took 101 in
        101 regions, however many blocks they were.

        Args:
            regions: stretches of memory that hold the blocks one behind the other: one a contiguous
                tensor of the KV cache, such as K and V of each layer, or one in all where a block
                holds all of its layers.

        Raises:
            TypeError: not an integer.
            ValueError: less than one region.
        """
        regions = operator.index(regions)
        if regions < 1:
            raise ValueError(f"a KV cache has at least one region, not {regions}")
        return regions * self.runs

    def _add_runs(
        self, tables: int, blocks: int, neighbours: int, runs: int, runs_either: int, longest: int
    ) -> None:
        # All sums before the first is kept: without memory for one of them, nothing is added.
        tables += self.tables
        blocks += self.blocks
        neighbours += self.neighbours
        runs += self.runs
        runs_either += self.runs_either
        longest = max(longest, self.longest_run)
        self.tables = tables
        self.blocks = blocks
        self.neighbours = neighbours
        self.runs = runs
        self.runs_either = runs_either
        self.longest_run = longest


@dataclass
class Contiguity(Runs):
    """How contiguous tables are: one, or all of a trace.

    Attributes:
        tile: blocks in a tile, 1 to 2**31-1.
        tiles: that the tables touch, each table by itself.
        packed_tiles: that they would touch if their blocks were packed.
        highest_id: the highest block id in all tables, -1 if there is none.

    Raises:
        TypeError: the tile is not an integer.
        ValueError: it is out of range.
    """

    tile: int
    tiles: int = 0
    packed_tiles: int = 0
    highest_id: int = -1

    def __post_init__(self) -> None:
        self.tile = operator.index(self.tile)
        if not 1 <= self.tile <= MAX_ID:
            raise ValueError(f"a tile has 1 to {MAX_ID} blocks, not {self.tile}")

    def add(self, table: npt.ArrayLike) -> None:
        """Add a table.

        Args:
            table: block ids, shape ``(positions,)``: a list or tuple of ints, or an array of any
                integer type. Nothing is wrapped, rounded or flattened.

        Raises:
            TypeError: something else than integers; of blocks, pass their ``block_id``.
            ValueError: an id beyond 0 ... 2**31-1, such as -1 that pads a table, or not one
                dimension: of tables by request or by KV-cache group, as
                ``KVCacheManager.get_block_ids`` returns them, pass one at a time. After an error
                nothing has been added.
        """
        self._add(1, _contiguity.table_figures(_as_table(table), self.tile))

    def add_all(self, tables: Iterable[npt.ArrayLike]) -> None:
        """Add many tables, as ``add`` does one; all of them or, after an error, none.

        One call of the compiled module, on a copy of 4 bytes a position: for tables of some 20
        blocks several times as fast as one by one. While it looks at many, other threads run.
        """
        all_ids = [_as_table(table) for table in tables]
        lengths = np.array([len(ids) for ids in all_ids], np.int64)
        ids = np.concatenate(all_ids) if all_ids else np.empty(0, np.int32)
        self._add(len(all_ids), _contiguity.trace_figures(ids, lengths, self.tile))

    def _add(self, tables: int, figures: tuple[int, int, int, int, int, int, int, int]) -> None:
        *runs, tiles, packed_tiles, highest_id = figures
        tiles += self.tiles
        packed_tiles += self.packed_tiles
        highest_id = max(highest_id, self.highest_id)
        self._add_runs(tables, *runs)
        self.tiles = tiles
        self.packed_tiles = packed_tiles
        self.highest_id = highest_id

    @property
    def tile_amplification(self) -> float:
        """Tiles that are touched, over those that packed tables would touch."""
        return _ratio(self.tiles, self.packed_tiles)

    @property
    def high_water_ratio(self) -> float:
        """The highest block id plus 1, over the blocks in the tables.

        For tables that live at the same time, as those of a batch: a kernel that reads the cache
        from block 0 up to the highest that is in use, like contiguous paged attention on Gaudi
        (HabanaAI/vllm-fork#424), reads this many times what it needs. vllm-project/vllm-gaudi#376
        would defragment above 1.5. Where tables follow one another in the same blocks, or share
        them, each counts, and the ratio can fall below 1.
        """
        return _ratio(self.highest_id + 1, self.blocks)


@dataclass
class Copies(Runs):
    """How well copies between two memories merge, say from a prefill to a decode instance.

    A copy is two tables of one length, source and destination. Here a run goes on only where both
    sides advance by 1 (in either direction: or both fall by 1), as in vllm-project/vllm#48434 and
    #56110. Ids are those of two memories, in which block 0 may be one like any other: it counts as
    a block. Leave null blocks out of both sides, as vLLM's connectors do.
    """

    def add(self, source: npt.ArrayLike, destination: npt.ArrayLike) -> None:
        """Add the copy of ``source[i]`` to ``destination[i]`` for each i.

        Raises:
            TypeError, ValueError: as ``Contiguity.add``, and a ValueError for sides of different
                lengths. After an error nothing has been added.
        """
        figures = _contiguity.copy_figures(_as_table(source), _as_table(destination))
        self._add_runs(1, *figures)


def _as_table(ids: npt.ArrayLike) -> Table:
    """The one kind of array that the compiled module takes; a copy only where it has to be.

    Ids below 0 in an array of int32 are left for the compiled module to find.
    """
    one_dimension = "a block table has one dimension, not {}: pass tables one at a time"
    try:
        table = np.asarray(ids)
    except ValueError as error:  # lists of different lengths
        raise ValueError(one_dimension.format("lists in lists")) from error
    if table.ndim == 0:
        raise TypeError(f"a block table is a sequence of block ids, not {type(ids).__name__}")
    if table.ndim != 1:
        raise ValueError(one_dimension.format(f"the shape {table.shape}"))
    if table.dtype != np.int32 and table.size > 0:
        if table.dtype.kind not in "iu":
            raise TypeError(
                f"block ids are integers from 0 to {MAX_ID}, not {table.dtype}: convert them; of "
                "blocks, pass block_id"
            )
        for edge in (int(table.min()), int(table.max())):
            if not 0 <= edge <= MAX_ID:
                raise ValueError(
                    f"block ids go from 0 to {MAX_ID}, not {edge}: leave out what pads the table"
                )
    return np.ascontiguousarray(table, np.int32)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
