"""A native KV-cache free-block queue for vLLM.

Importing this package imports neither vLLM nor torch nor the compiled module: vLLM only logs what
goes wrong while it imports a plugin, so a broken build has to show later, when the plugin runs.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pyblockpool.errors import NotCompiledError

if TYPE_CHECKING:
    from pyblockpool._queue import FreeBlockQueue

__version__ = version("pyblockpool")
__all__ = ["FreeBlockQueue", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "FreeBlockQueue":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pyblockpool._queue import FreeBlockQueue
    except ImportError as error:
        raise NotCompiledError(
            f"the compiled module pyblockpool._queue does not load ({error}): install pyblockpool "
            "from a wheel or with `pip install .`, and do not import it from its source folder"
        ) from error
    globals()[name] = FreeBlockQueue
    return FreeBlockQueue
