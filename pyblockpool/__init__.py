"""A native KV-cache free-block queue for vLLM.

Importing this package imports neither vLLM nor torch nor the compiled modules, and reads no
metadata: vLLM only logs what goes wrong while it imports a plugin, so a broken installation has to
show later, when the plugin runs. So `FreeBlockQueue` and `__version__` are looked up when they are
asked for: NotCompiledError, an ImportError, if the module does not load or nothing is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyblockpool._queue import FreeBlockQueue

    __version__: str

__all__ = ["FreeBlockQueue", "__version__"]


def __getattr__(name: str) -> Any:
    from pyblockpool.errors import INSTALL_REMEDY, NotCompiledError

    value: Any
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value = version("pyblockpool")
        except PackageNotFoundError as error:
            raise NotCompiledError(f"pyblockpool is not installed: {INSTALL_REMEDY}") from error
    elif name == "FreeBlockQueue":
        try:
            from pyblockpool._queue import FreeBlockQueue as value
        except ImportError as error:
            raise NotCompiledError(
                f"the compiled module pyblockpool._queue does not load ({error}): {INSTALL_REMEDY}"
            ) from error
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
