"""The compiled module, built from csrc/contiguity.cpp: what pyblockpool.contiguity stands on.

Arrays have exactly the type that is named, and are contiguous; nothing is converted. Block ids have
the shape (positions,); ``lengths``, the positions of each of the tables that lie in them one behind
the other, has the shape (tables,). ``tile`` is in blocks. Numbers come as tuples: blocks,
neighbours, runs, runs_either, longest_run; of tables also tiles, packed_tiles and the highest id,
-1 where there is none. TypeError: another type, or not contiguous. ValueError: another number of
dimensions, an id or a tile out of range, lengths that do not match.
"""

import numpy as np
import numpy.typing as npt

def table_figures(
    ids: npt.NDArray[np.int32], tile: int
) -> tuple[int, int, int, int, int, int, int, int]: ...
def trace_figures(
    ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], tile: int
) -> tuple[int, int, int, int, int, int, int, int]: ...
def copy_figures(
    source: npt.NDArray[np.int32], destination: npt.NDArray[np.int32]
) -> tuple[int, int, int, int, int]: ...
