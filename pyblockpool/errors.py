"""Errors by meaning. Each message is a sentence that names the fix."""


class BlockQueueError(Exception):
    """Base of the errors by which pyblockpool refuses to be switched on."""


class SettingsError(BlockQueueError, ValueError):
    """A variable has a value that is not allowed: correct the variable."""


class UnsupportedVLLMError(BlockQueueError, RuntimeError):
    """The installed vLLM lacks, or does otherwise, something that the plugin stands on."""


class ConflictError(BlockQueueError, RuntimeError):
    """Somebody else has already replaced what the plugin would replace."""


class NotCompiledError(BlockQueueError, ImportError):
    """The compiled module is missing or does not load: install pyblockpool from a wheel."""
