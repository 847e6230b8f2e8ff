"""The compiled module, built from csrc/contiguity.cpp: what pyblockpool.contiguity stands on.

Arrays have one dimension, exactly the type that is named, and are contiguous; nothing is converted.
Numbers come as tuples: blocks, neighbours, runs, runs_either, longest_run; of tables also tiles,
packed_tiles and the highest id, -1 where there is none. ValueError: an id or a tile out of range,
lengths that do not match.
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
