"""Errors by meaning. Each message is a sentence that names the fix."""

INSTALL_REMEDY = (
    "install pyblockpool from a wheel or with `pip install .`, and do not import it from its "
    "source folder"
)


class BlockQueueError(Exception):
    """Base of the errors that say why pyblockpool cannot do what was asked of it."""


class SettingsError(BlockQueueError, ValueError):
    """A variable has a value that is not allowed: correct the variable."""


class UnsupportedVLLMError(BlockQueueError, RuntimeError):
    """The installed vLLM lacks, or does otherwise, something that the plugin stands on."""


class ConflictError(BlockQueueError, RuntimeError):
    """Somebody else has already replaced what the plugin would replace."""


class NotCompiledError(BlockQueueError, ImportError):
    """The compiled module is missing or does not load: install pyblockpool from a wheel."""


class MissingExtraError(BlockQueueError, ImportError):
    """A package is missing that only some commands need: install the extra with it."""


class InactiveError(BlockQueueError, RuntimeError):
    """The engine that was called runs without pyblockpool: set the variable where it starts."""


class TraceError(BlockQueueError, ValueError):
    """A trace, of requests or of block tables, cannot be read: it says where and what."""


class ReplayError(BlockQueueError, RuntimeError):
    """A request trace cannot be replayed as asked; the message says why."""
