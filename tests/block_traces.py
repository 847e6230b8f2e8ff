"""Block traces for tests, written as the format says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Row = dict[str, Any]

FULL = {"block_size": 16, "kind": "FullAttentionSpec", "layers": 2}
WINDOW = {"block_size": 16, "kind": "SlidingWindowSpec", "layers": 3}


def header(**changes: Any) -> Row:
    row = {
        "block_trace": 1,
        "pyblockpool": "0.1.0",
        "vllm": "0.32.0",
        "queue": "native:extent,size=8",
        "policy": "extent",
        "implementation": "native",
        "extent": 8,
        "model": "tiny-llama",
        "attention": "CPU_ATTN",
        "pid": 4711,
        "dp_rank": None,
        "started": "2026-11-30T12:00:00+00:00",
        "num_blocks": 100,
        "caching": True,
        "groups": [FULL],
    }
    return row | changes


def table_arguments(*tables: Sequence[int]) -> dict[str, Any]:
    """Those of `TraceWriter.put_table()` that tell the tables, one for each KV-cache group."""
    flat: list[Any] = []
    for group, ids in enumerate(tables):
        blocks = [SimpleNamespace(block_id=block_id) for block_id in ids]
        flat += group, len(blocks), blocks[0] if blocks else None, blocks
    return {"weight": sum(map(len, tables)), "tables": flat}


def ended(request_id: str = "cmpl-1", prompt: int = 100) -> Any:
    """A request, as `TraceWriter.put_table()` takes it; prompt in tokens."""
    return SimpleNamespace(request_id=request_id, num_prompt_tokens=prompt)


def runs_of(table: Sequence[int]) -> list[list[int]]:
    """``[[first, count], ...]``; null blocks are runs of their own."""
    runs: list[list[int]] = []
    for block in table:
        first, count = runs[-1] if runs else (-1, 0)
        if block == (first + count if first > 0 else 0) and runs:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return runs


def request(table: Sequence[int], prompt: int, **changes: Any) -> Row:
    """A record of a request that has the table; ``prompt`` in tokens."""
    row = {
        "t": 1.5,
        "request": "cmpl-1",
        "outcome": "length",
        "group": 0,
        "prompt": prompt,
        "tokens": 16 * len(table),
        "hit": 0,
        "prefill": 0.25,
        "blocks": len(table),
        "runs": runs_of(table),
    }
    return row | changes


def reset(done: bool = True, kind: str = "prefix_cache") -> Row:
    return {"t": 2.0, "reset": kind, "done": done}


def end(**changes: Any) -> Row:
    return {"t": 9.0, "end": "closed", "requests": 3, "lost": 0} | changes


def text(*rows: Row) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, *rows: Row) -> Path:
    path.write_text(text(*rows), encoding="utf-8")
    return path
