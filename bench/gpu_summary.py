"""What bench/gpu.sh has measured: a short table, and the same as summary.json beside the results.

The exit status is 1 if a part has failed or was out of time, and 0 if all that could run are done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention_backends import IN_PYTORCH
from provenance import provenance
from rich.console import Console
from rich.markup import escape
from rich.table import Table

DONE, FAILED, OUT_OF_TIME = "done", "failed", "out of time"


def of_kernel(results: dict[str, Any]) -> str:
    """Prefill with the largest tile, and gathering: times the time of a table in id order."""
    tile = max(row["tile"] for row in results["prefill"])
    rows = [row for row in results["prefill"] if row["tile"] == tile]
    return f"to id order, KV tile {tile}: {ratios(rows)}; gather: {ratios(results['gather'])}"


def ratios(rows: Sequence[dict[str, Any]]) -> str:
    """Of the longest prompt, without the row that is 1.0."""
    prompt = max(row["prompt"] for row in rows)
    shown = [row for row in rows if row["prompt"] == prompt and row["table"] != "id order"]
    return ", ".join(f"{row['table']} {row['ratio']:.2f}x" for row in shown)


def of_transfer(results: dict[str, Any]) -> str:
    """The first layout, a copy for each run."""
    first = [row for row in results["rows"] if row["layout"] == results["rows"][0]["layout"]]
    ways: dict[str, list[str]] = {}
    for row in first:
        if row["queue"] != "native":  # the tables of vLLM's queue
            speed = f"{row['queue']} {row['run']['gb_per_s'][1]:.1f}"
            ways.setdefault(row["way"], []).append(speed)
    return "; ".join(f"{way}, GB/s: {', '.join(speeds)}" for way, speeds in ways.items())


def of_micro(results: dict[str, Any]) -> str:
    """Native to vLLM's class."""
    found = {
        operation: ns["vllm"] / ns["native"]
        for operation, ns in results["ns_per_block"].items()
        if {"vllm", "native"} <= set(ns)
    }
    low, high = min(found.values()), max(found.values())
    middle = statistics.median(found.values())
    return (
        f"vLLM's class to native, {len(found)} operations: {middle:.1f}x ({low:.1f} to {high:.1f})"
    )


def of_prefill(results: dict[str, Any]) -> str:
    """Of the last round, by variant."""
    cells = {
        run["variant"]: f"{1000 * run['rounds'][-1]['prefill']:,.0f} ms "
        f"({run['rounds'][-1]['tile_amplification']:.1f})"
        for run in results["runs"]
    }
    shape = results["runs"][0]["shape"]
    shown = ", ".join(f"{variant} {cell}" for variant, cell in cells.items())
    return f"round {shape['rounds']}, {shape['prompt']:,} tokens (tiles): {shown}"


# The first word of a part -> its results in a line.
LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "kernel": of_kernel,
    "transfer": of_transfer,
    "micro": of_micro,
    "prefill": of_prefill,
}


def summary(parts: Path, backends: Path, results: Path) -> dict[str, Any]:
    """All that is known of a run.

    Args:
        parts: lines of name, state, seconds, reason.
        backends: as bench/attention_backends.py writes them.
        results: the folder with NAME.json of each part that is done.

    Raises:
        OSError: a part is done, and has left no results.
    """
    reasons = dict(line.split("\t") for line in backends.read_text().splitlines())
    fields = ("name", "state", "seconds", "reason")
    found: dict[str, Any] = {
        "in_pytorch": reasons.get(IN_PYTORCH, ""),
        "parts": [
            dict(zip(fields, line.split("\t"), strict=True))
            for line in parts.read_text().splitlines()
        ],
    }
    for part in found["parts"]:
        if part["state"] == DONE:
            saved = json.loads((results / f"{part['name']}.json").read_text())
            part["result"] = LINES[part["name"].partition("_")[0]](saved)
    return {**provenance(), **found}


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"{found['gpu'] or found['cpu']}, PyTorch {found['torch']}")
    table.add_column("part")
    table.add_column("s", justify="right")
    table.add_column("result")
    for part in found["parts"]:
        result = part.get("result") or f"{part['state']}: {part['reason']}"
        table.add_row(part["name"], part["seconds"], escape(result))
    console.print(table)
    if found["in_pytorch"]:
        console.print(f"This vLLM lacks, and PyTorch did: {found['in_pytorch']}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--backends", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    found = summary(options.parts, options.backends, options.results)
    saved = options.results / "summary.json"
    saved.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(width=120)
    show(console, found)
    console.print(f"Results: {options.results}", soft_wrap=True, markup=False)
    return int(any(part["state"] in (FAILED, OUT_OF_TIME) for part in found["parts"]))


if __name__ == "__main__":
    sys.exit(main())
