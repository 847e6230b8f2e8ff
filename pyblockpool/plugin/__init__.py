"""The vLLM plugin: the only part of pyblockpool that touches vLLM."""
