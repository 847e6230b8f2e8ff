"""A tiny model on disk whose layers keep KV caches of two kinds, in several groups."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_llama import write_tiny_llama

SLIDING_WINDOW = 64  # tokens


def write_sliding_llama(directory: Path) -> Path:
    """One layer that sees all tokens, and three that see the last `SLIDING_WINDOW`: four groups."""
    write_tiny_llama(directory, layers=4)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["layer_types"] = ["full_attention", *["sliding_attention"] * 3]
    config["sliding_window"] = SLIDING_WINDOW
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory
