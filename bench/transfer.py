"""A block table as copies: how many, and how fast.

    python bench/transfer.py                 # host to host
    python bench/transfer.py --device cuda   # from a GPU to pinned host memory

A KV cache is a number of regions (K and V of each layer, say), each of which has all blocks one
behind the other. To move the blocks of a prompt, a transfer takes a copy of each run of each
region; a NIXL transfer, a descriptor. Two ways to go:

    to pool     from the pool of one engine to that of another, as from prefill to decode: a copy
                goes on only as long as both tables do
    to buffer   from a pool to where the blocks lie one behind the other, as in staging buffers

The tables are those of prompts in two engines that play the same requests, replayed through vLLM's
KVCacheManager (pyblockpool/replay.py): one computes prompts in chunks and ends with the first
token, the other has the answers, too. Requests are made, from a seed, or those of `--trace`. Only
the last ones count, when the pools are full of cached blocks. With `--alone`, and where vLLM is
not installed, the queues are played without vLLM, and policy lru stands for its own; prefixes are
then not shared. The tables of made requests are the same both ways. Or the tables are those that
real engines have recorded (`--block-traces`), the first file standing for vLLM.

All lists of copies are made beforehand, and only the copies are timed, `copy_` by `copy_`, then
(CUDA) one synchronisation for each prompt. Rivals: the tables of each queue, a copy for each block
or for each run. They take turns in each repeat. Two regions are copied; descriptors are those of
all regions of the model. Before a time counts, each table has arrived byte by byte, and nothing was
written beside it. The tables of *native* are those of vLLM's queue: what these two differ by is
noise.

What it does not show: a network, kernels that gather blocks in place of copies, and the share of a
request's time that a transfer takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transfer_tables
from provenance import provenance
from rich.console import Console
from rich.table import Table as Shown

from pyblockpool.contiguity import Copies, Table
from pyblockpool.errors import BlockQueueError
from pyblockpool.replay import Setup
from pyblockpool.request_trace import read_requests

RESULTS = Path(__file__).parent / "results"

Pairs: TypeAlias = list[tuple[Table, Table]]
METHODS = ("block", "run")
TIMED_REGIONS = 2


@dataclass(frozen=True)
class Layout:
    """A KV cache of 16-bit numbers in blocks of 16 tokens.

    Attributes:
        name: for the reader.
        block_bytes: of a block in one region.
        regions: of the whole model.
    """

    name: str
    block_bytes: int
    regions: int


LAYOUTS = [
    Layout("K and V of 8 heads of 128, 32 layers", 16 * 8 * 128 * 2, 64),
    Layout("MLA, 576 a token, 61 layers", 16 * 576 * 2, 61),
    Layout("K and V of 1 head of 128, 80 layers", 16 * 128 * 2, 160),
]


def merged(source: Table, destination: Table) -> list[tuple[int, int, int]]:
    """Copies of neighbouring blocks as one: (first of the source, of the destination, blocks)."""
    goes_on = (np.diff(source) == 1) & (np.diff(destination) == 1)
    starts = np.flatnonzero(np.concatenate([[len(source) > 0], ~goes_on]))
    counts = np.diff(np.append(starts, len(source)))
    columns = source[starts], destination[starts], counts
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Memory:
    """Both sides: bytes of shape (regions, blocks, bytes of a block).

    Args:
        layout: of the cache.
        sizes: blocks of the source, of the destination.
        device: of the source, cpu or cuda. The destination is in host memory.
    """

    def __init__(self, layout: Layout, sizes: tuple[int, int], device: str) -> None:
        shapes = [(TIMED_REGIONS, blocks, layout.block_bytes) for blocks in sizes]
        # Each eight bytes of the source differ from all others, and from zero.
        words = torch.arange(1, np.prod(shapes[0]) // 8 + 1, dtype=torch.int64, device=device)
        self.source = words.view(torch.uint8).view(shapes[0])
        self.destination = torch.zeros(shapes[1], dtype=torch.uint8, pin_memory=device == "cuda")
        self._synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def copies(self, source: Table, destination: Table, method: str) -> list[Any]:
        """(destination, source) of each copy, as flat views."""
        if method == "run":
            pieces = merged(source, destination)
        else:
            sides = source.tolist(), destination.tolist()
            pieces = [(s, d, 1) for s, d in zip(*sides, strict=True)]
        return [
            (self.destination[region, d : d + n].view(-1), self.source[region, s : s + n].view(-1))
            for region in range(TIMED_REGIONS)
            for s, d, n in pieces
        ]

    def transfer(self, copies: Sequence[Any]) -> None:
        for destination, source in copies:
            destination.copy_(source, non_blocking=True)
        self._synchronize()

    def check(self, pairs: Pairs, copies: Sequence[Sequence[Any]]) -> None:
        """Raise if a table does not arrive, or something beside it; the destination is 0 again."""
        for (source, destination), those in zip(pairs, copies, strict=True):
            self.transfer(those)
            at = torch.from_numpy(destination.astype(np.int64))
            of = torch.from_numpy(source.astype(np.int64)).to(self.source.device)
            if not torch.equal(self.destination[:, at], self.source[:, of].cpu()):
                raise RuntimeError("a table did not arrive as it was")
            self.destination[:, at] = 0
        if self.destination.view(torch.int64).any():
            raise RuntimeError("something was written beside the blocks of the tables")


def timed(
    layout: Layout, pairs: dict[str, Pairs], sizes: tuple[int, int], device: str, repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds for all tables of a queue, for each repeat, by (queue, method)."""
    memory = Memory(layout, sizes, device)
    copies = {}
    for queue, of_queue in pairs.items():
        for method in METHODS:
            lists = [memory.copies(*pair, method) for pair in of_queue]
            memory.check(of_queue, lists)
            copies[queue, method] = lists
    taken: dict[tuple[str, str], list[float]] = {rival: [] for rival in copies}
    rivals = list(copies)
    for repeat in range(-1, repeats):  # the first one warms up
        at = repeat % len(rivals)
        for rival in [*rivals[at:], *rivals[:at]]:
            start = time.perf_counter()
            for those in copies[rival]:
                memory.transfer(those)
            spent = time.perf_counter() - start
            if repeat >= 0:
                taken[rival].append(spent)
    return taken


def to_buffer(tables: Sequence[Table], size: int) -> Pairs:
    """Each table behind the one before it, from the start again where it would not fit."""
    pairs, at = [], 0
    for table in tables:
        at = at if at + len(table) <= size else 0
        pairs.append((table, np.arange(at, at + len(table), dtype=np.int32)))
        at += len(table)
    return pairs


def summaries(
    layout: Layout, way: str, pairs: dict[str, Pairs], taken: dict[tuple[str, str], list[float]]
) -> Iterator[dict[str, Any]]:
    """A row for each queue; medians, with the quartiles about them.

    Ratios are the time of the first queue's tables, by the same method in the same repeat, over
    that of the queue's.
    """
    first = next(iter(pairs))
    for queue, of_queue in pairs.items():
        figures = Copies()
        for pair in of_queue:
            figures.add(*pair)
        moved = figures.blocks * layout.block_bytes * TIMED_REGIONS / 1e9
        row: dict[str, Any] = {
            "layout": asdict(layout),
            "way": way,
            "queue": queue,
            "tables": figures.tables,
            "blocks": figures.blocks,
            "runs": figures.runs,
            "descriptors": figures.descriptors(layout.regions),
        }
        for method in METHODS:
            seconds = taken[queue, method]
            ratios = [a / b for a, b in zip(taken[first, method], seconds, strict=True)]
            row[method] = {
                "gb_per_s": [round(each, 3) for each in quartiles([moved / s for s in seconds])],
                "ratio": [round(each, 3) for each in quartiles(ratios)],
            }
        yield row


def quartiles(samples: Sequence[float]) -> list[float]:
    return statistics.quantiles(samples, n=4, method="inclusive")


def show(console: Console, layout: Layout, rows: Sequence[dict[str, Any]], title: str) -> None:
    shown = Shown(title=f"{layout.name}: blocks of {layout.block_bytes / 1024:.0f} KiB; {title}")
    for column in ("way", "tables of"):
        shown.add_column(column)
    for column in (
        "blocks a run",
        "descriptors a prompt",
        "by block, GB/s",
        "by run, GB/s",
        f"by run, against {rows[0]['queue']}'s tables",
    ):
        shown.add_column(column, justify="right")
    for row in rows:
        if row["queue"] == rows[0]["queue"]:
            shown.add_section()
        speeds = (row[method]["gb_per_s"][1] for method in METHODS)
        low, middle, high = row["run"]["ratio"]
        shown.add_row(
            row["way"],
            row["queue"],
            f"{row['blocks'] / row['runs']:.1f}",
            f"{row['descriptors'] / row['tables']:,.0f}",
            *(f"{speed:.2f}" for speed in speeds),
            f"{middle:.2f}x ({low:.2f} to {high:.2f})",
        )
    console.print(shown)


def played(options: argparse.Namespace) -> tuple[dict[str, dict[str, Pairs]], str]:
    """The pairs of tables by way and queue, and where they come from."""
    if options.trace:
        requests = read_requests(options.trace, limit=options.requests)
        what = options.trace.name
    else:
        requests = transfer_tables.made_requests(options.requests, options.seed)
        what = "made requests"
    prefill = Setup(options.blocks, residents=8, chunk=512, seed=options.seed)
    decode = Setup(options.blocks, residents=48, seed=options.seed + 1)
    one_token = [replace(request, output_length=1) for request in requests]
    first = max(len(requests) // 2, len(requests) - options.tables)
    ways: dict[str, dict[str, Pairs]] = {"to pool": {}, "to buffer": {}}
    alone = options.alone or not transfer_tables.HAS_VLLM
    tables_of = (
        transfer_tables.tables_of_a_queue_alone if alone else transfer_tables.replayed_tables
    )
    for queue, value in transfer_tables.QUEUES.items():
        sources = tables_of(value, one_token, prefill)[first:]
        destinations = tables_of(value, requests, decode)[first:]
        ways["to pool"][queue] = list(zip(sources, destinations, strict=True))
        ways["to buffer"][queue] = to_buffer(sources, options.blocks)
    for queues in ways.values():
        for ours, theirs in zip(queues["native"], queues["vLLM"], strict=True):
            if not all(map(np.array_equal, ours, theirs)):
                raise RuntimeError("the tables of policy lru are not those of vLLM's queue")
    how = "queues alone, lru for vLLM's" if alone else "replayed through vLLM's pool"
    return ways, f"{what}, {how}"


def recorded(options: argparse.Namespace) -> tuple[dict[str, dict[str, Pairs]], str]:
    queues = {path.stem: transfer_tables.recorded_tables(path) for path in options.block_traces}
    size = max(options.blocks, *(len(table) for tables in queues.values() for table in tables))
    pairs = {queue: to_buffer(tables[-options.tables :], size) for queue, tables in queues.items()}
    return {"to buffer": pairs}, "recorded tables"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument("--trace", type=Path, help="a request trace, as for pyblockpool replay")
    sources.add_argument(
        "--block-traces", type=Path, nargs="+", metavar="FILE", help="one for each queue"
    )
    parser.add_argument("--alone", action="store_true", help="make the tables without vLLM")
    parser.add_argument("--requests", type=int, default=800, help="default: %(default)s")
    parser.add_argument(
        "--tables", type=int, default=400, help="that are copied, the last ones; %(default)s"
    )
    parser.add_argument("--blocks", type=int, default=8_192, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=11, help="default: %(default)s")
    parser.add_argument("--short", action="store_true", help="120 tables, 5 repeats")
    parser.add_argument("--out", type=Path, help="default: bench/results/transfer_DEVICE.json")
    options = parser.parse_args(arguments)
    if options.short:
        options.tables, options.repeats = 120, 5
    if options.requests < 2 or options.tables < 1 or options.repeats < 2:
        parser.error("it takes at least 2 requests, 1 table and 2 repeats")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch has no CUDA device here: leave out --device cuda")
    torch.set_num_threads(1)
    try:
        ways, title = (recorded if options.block_traces else played)(options)
    except (BlockQueueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    console, rows = Console(width=120), []
    for layout in LAYOUTS:
        of_layout: list[dict[str, Any]] = []
        for way, pairs in ways.items():
            sides = zip(*(pair for of_queue in pairs.values() for pair in of_queue), strict=True)
            source, destination = (1 + max(int(table.max()) for table in side) for side in sides)
            taken = timed(layout, pairs, (source, destination), options.device, options.repeats)
            of_layout += summaries(layout, way, pairs, taken)
        show(console, layout, of_layout, title)
        rows += of_layout
    card = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    saved = {
        **provenance(),
        "torch": torch.__version__,
        **card,
        "tables_from": title,
        "timed_regions": TIMED_REGIONS,
        "rows": rows,
    }
    out = options.out or RESULTS / f"transfer_{options.device}.json"
    out.write_text(json.dumps(saved, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
