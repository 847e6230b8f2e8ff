"""A native KV-cache free-block queue for vLLM."""

from importlib.metadata import version

from pyblockpool.errors import NotCompiledError

try:
    from pyblockpool._queue import FreeBlockQueue
except ImportError as error:
    raise NotCompiledError(
        f"the compiled module pyblockpool._queue does not load ({error}): install pyblockpool "
        "(`pip install .` or a wheel) and do not import it from its source folder"
    ) from error

__version__ = version("pyblockpool")
__all__ = ["FreeBlockQueue", "__version__"]
