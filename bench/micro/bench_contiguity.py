"""Figures of block tables: the compiled module against the NumPy code that it has replaced.

Tables of a pool of 100,000 blocks, in which each block is in one table. The NumPy code counts less:
runs and tiles, but neither the longest run nor the other direction nor the highest id.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from answers import record

from pyblockpool.contiguity import Contiguity, Table

TILE = 8


def add_with_numpy(figures: dict[str, int], table: Table) -> None:
    figures["tables"] += 1
    figures["blocks"] += len(table)
    figures["runs"] += int(np.count_nonzero(np.diff(table) != 1)) + 1
    figures["tiles"] += len(np.unique(table // TILE))
    figures["packed_tiles"] += -(-len(table) // TILE)


def expected(tables: list[Table]) -> dict[str, int]:
    plain = [table.tolist() for table in tables]
    return {
        "tables": len(plain),
        "blocks": sum(map(len, plain)),
        "runs": sum(1 + sum(b != a + 1 for a, b in pairwise(ids)) for ids in plain),
        "tiles": sum(len({block_id // TILE for block_id in ids}) for ids in plain),
        "packed_tiles": sum(-(-len(ids) // TILE) for ids in plain),
    }


@pytest.mark.parametrize("how", ["one by one", "at once"])
@pytest.mark.parametrize("adder", ["numpy", "native"])
@pytest.mark.parametrize("length", [20, 500, 10_000])
def test_tables(
    benchmark: Any,
    repeat: int,
    rounds: int,
    length: int,
    order: str,
    adder: str,
    how: str,
    ids: list[int],
) -> None:
    whole = np.array(ids, np.int32) + 1  # block 0 is never in a table
    tables = [whole[first : first + length] for first in range(0, len(ids), length)]
    found: dict[str, int] = {}

    def numpy() -> None:
        found.update(dict.fromkeys(expected([]), 0))
        for table in tables:
            add_with_numpy(found, table)

    def native() -> None:
        contiguity = Contiguity(TILE)
        if how == "at once":
            contiguity.add_all(tables)
        else:
            for table in tables:
                contiguity.add(table)
        found.update({name: getattr(contiguity, name) for name in expected([])})

    benchmark.pedantic({"numpy": numpy, "native": native}[adder], rounds=rounds, warmup_rounds=1)
    operation = f"contiguity: {length:,} blocks, {order}, {how}"
    record(benchmark, operation, adder, len(ids), found == expected(tables))
