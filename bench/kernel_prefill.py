"""Prefill by a compiled FlexAttention kernel, and gathering, over a paged KV cache; without vLLM.

    python bench/kernel_prefill.py                 # on the CPU
    python bench/kernel_prefill.py --device cuda   # on a GPU

One request, whose keys and values lie in blocks all over a physical cache, as its *block table*
says. All that differs is the table:

    id order   1, 2, 3, ...: a fresh pool
    reversed   the same blocks, the last first
    shuffled   a random sample of the pool
    aged       from a pool with a first-in-first-out free list, in which simulated requests have
               been admitted, have grown block by block and been released: what vLLM's queue gives
    trace      the longest table that fits of a block trace, which an engine has written (--trace)

*Prefill* is PyTorch's FlexAttention, compiled, with a block mask over the physical cache, as vLLM's
FlexAttention backend builds it: where the KV tile is one block, from the block table, in the order
of the table, and every tile is masked; where it is larger, the tiles ascend, and tiles that are
needed as a whole are computed without the mask. A tile is visited if any block of the request lies
in it. *Gather* copies the blocks of the request out of the cache, in the order of the table
(torch.index_select), after other memory has gone through the caches of the processor, as between
two uses of a KV cache; GB/s count bytes read and bytes written.

Tables take turns, repeat by repeat; compilation is left out. Before a time counts, what was
gathered has to be the keys and values that were written, and the output of each kernel has to agree
with attention in float64 over them; with two blocks of the table exchanged it must not.

What it does not show: decoding, several requests at a time, the time to build a block mask, and
whole models, in which attention is a part of a step (bench/e2e_prefill.py has one). Other kernels
that read one block at a time are like the tile of one block at best. The longest table of a trace
is one of many, and not the average. A transfer to other memory is no gather.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from provenance import provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pyblockpool import block_trace
from pyblockpool.contiguity import Contiguity
from pyblockpool.errors import TraceError

RESULTS = Path(__file__).parent / "results"

ID_ORDER = "id order"
# Queries in a tile: vLLM's choice since PyTorch 2.9, and what PyTorch's code generator for CPUs
# needs a prompt to be a multiple of.
QUERY_TILE = 16
# Largest error of an output: of values of a standard deviation of 1, after rounding to the type.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# Of the reference, computed at a time.
REFERENCE_QUERIES = 1024
# More than the caches of most processors; so triton.testing.do_bench clears that of a GPU.
OTHER_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    """The physical cache, and what attends to it.

    Attributes:
        heads: of the queries.
        kv_heads: of keys and values; each serves heads / kv_heads heads of queries.
        head_dim: numbers in a head.
        block_size: tokens in a block.
        num_blocks: in the pool, block 0 included, which is never in a table.
    """

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class Defaults:
    """What is measured where nothing else is asked for; the first prompt is that of --short."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    prompts: tuple[int, ...]
    repeats: int
    short_repeats: int


DEFAULTS = {
    "cpu": Defaults("float32", 4, 2, 64, 2_400, (2_048, 4_000), 7, 3),
    "cuda": Defaults("bfloat16", 32, 8, 128, 8_192, (4_096, 16_384), 21, 7),
}
TILES = [16, 32, 64, 128]
SHORT_TILES = [16, 128]


def aged_table(length: int, num_blocks: int, chance: random.Random) -> list[int]:
    """The first free blocks of a pool that 480 requests have gone through, up to 40 at a time.

    They are admitted with up to 1/56 of the pool, grow by up to 1/80 of it, block by block, and end
    in a random order; their blocks go to the end of the free list, the last of each table first, as
    vLLM frees them.
    """
    free = deque(range(1, num_blocks))
    running: list[tuple[list[int], int]] = []  # and how many blocks it has yet to grow by
    waiting = 480
    while waiting or running:
        blocks = chance.randint(1, max(1, num_blocks // 56))
        if waiting and len(running) < 40 and blocks <= len(free):
            growth = chance.randint(0, num_blocks // 80)
            running.append(([free.popleft() for _ in range(blocks)], growth))
            waiting -= 1
            continue
        at = chance.randrange(len(running))
        table, growth = running[at]
        if growth and free:
            table.append(free.popleft())
            running[at] = table, growth - 1
        else:
            free.extend(reversed(table))
            del running[at]
    return [free.popleft() for _ in range(length)]


def made_tables(length: int, num_blocks: int, seed: int) -> dict[str, list[int]]:
    """Tables of so many blocks from a pool of ``num_blocks``, of which block 0 is never used."""
    in_order = list(range(1, length + 1))
    return {
        ID_ORDER: in_order,
        "reversed": in_order[::-1],
        "shuffled": random.Random(seed).sample(range(1, num_blocks), length),
        "aged": aged_table(length, num_blocks, random.Random(seed)),
    }


@dataclass(frozen=True)
class TracedTable:
    """The table of a request of an engine.

    Attributes:
        description: which it is.
        num_blocks: in the pool of that engine.
        blocks: their ids.
    """

    description: str
    num_blocks: int
    blocks: list[int]


def longest_table(path: Path, block_size: int, num_blocks: int | None) -> TracedTable:
    """The longest table that fits of a block trace: one of blocks of that size, all of them kept.

    Args:
        path: of the trace.
        block_size: tokens in a block.
        num_blocks: ids have to be below this; None for no bound.

    Raises:
        TraceError: not a block trace, or no table in it fits.
        OSError: it cannot be read.
    """
    longest: TracedTable | None = None
    for section in block_trace.read_sections(path):
        for record in section.records():
            if not isinstance(record, block_trace.Request) or len(record.table) < 2:
                continue
            table = record.table
            fits = (
                section.header.groups[record.group].block_size == block_size
                and (num_blocks is None or table.max() < num_blocks)
                and table.min() > 0  # no null block
                and len(np.unique(table)) == len(table)
            )
            if fits and (longest is None or len(table) > len(longest.blocks)):
                longest = TracedTable(
                    f"{path.name}, request {record.request}, group {record.group}, after "
                    f"{record.t:.3f} s: {len(table)} blocks",
                    section.header.num_blocks,
                    table.tolist(),
                )
    if longest is None:
        below = "" if num_blocks is None else f", with ids below {num_blocks}"
        raise TraceError(
            f"{path}: no table of two blocks or more of {block_size} tokens, without null blocks"
            f"{below}: give --block-size and --blocks as the engine had them, or another trace"
        )
    return longest


def block_mask(
    table: torch.Tensor, prompt: int, *, num_blocks: int, block_size: int, tile: int
) -> BlockMask:
    """The causal mask of one prompt over the whole physical cache.

    Args:
        table: physical block of each logical one, int64 of shape (blocks of the prompt,).
        prompt: tokens, a multiple of QUERY_TILE.
        num_blocks: in the cache; times ``block_size`` a multiple of the tile.
        block_size: tokens in a block.
        tile: tokens in a KV tile, a multiple of the block size.

    Returns:
        A mask of ``prompt`` queries and ``num_blocks * block_size`` keys.
    """
    device = table.device
    logical = torch.full((num_blocks,), -1, device=device)
    logical[table] = torch.arange(len(table), device=device)

    def causal(b: Any, h: Any, query: Any, slot: Any) -> Any:
        block = logical[slot // block_size]
        position = block * block_size + slot % block_size
        return (block >= 0) & (position <= query)

    # Of each tile: the first position, and the last, which is beyond all where one of its blocks
    # is not the request's.
    beyond = torch.where(logical < 0, num_blocks, logical).view(-1, tile // block_size)
    first = beyond.amin(dim=1) * block_size
    last = beyond.amax(dim=1) * block_size + block_size - 1
    queries = torch.arange(0, prompt, QUERY_TILE, device=device)[:, None]
    visited = first <= queries + QUERY_TILE - 1
    if tile == block_size:
        order = first.argsort()
        masked, whole = _listed(visited, order), (None, None)
    else:
        order = torch.arange(len(first), device=device)
        full = last <= queries
        masked, whole = _listed(visited & ~full, order), _listed(full, order)
    return BlockMask.from_kv_blocks(
        *masked,
        *whole,
        BLOCK_SIZE=(QUERY_TILE, tile),
        mask_mod=causal,
        seq_lengths=(prompt, num_blocks * block_size),
    )


def _listed(tiles: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and indices of the tiles that are set in each row, in that order.

    Args:
        tiles: bool of shape (tiles of queries, KV tiles).
        order: all KV tiles, shape (KV tiles,).

    Returns:
        int32 of the shapes (1, 1, tiles of queries) and (1, 1, tiles of queries, KV tiles).
    """
    set_first = tiles[:, order].to(torch.int8).argsort(dim=1, descending=True, stable=True)
    counts = tiles.sum(dim=1, dtype=torch.int32)
    return counts[None, None], order[set_first].to(torch.int32)[None, None]


def visits(mask: BlockMask) -> int:
    """How many KV tiles the kernel computes, summed over the tiles of queries."""
    whole = mask.full_kv_num_blocks
    return int(mask.kv_num_blocks.sum() + (0 if whole is None else whole.sum()))


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, of the shape of the queries: (heads, tokens, head_dim)."""
    serves = len(query) // len(key)
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    positions = torch.arange(query.shape[1], device=query.device)
    for head in range(len(query)):
        keys, values = key[head // serves].double(), value[head // serves].double()
        for begin in range(0, len(positions), REFERENCE_QUERIES):
            end = min(begin + REFERENCE_QUERIES, len(positions))
            out[head, begin:end] = F.scaled_dot_product_attention(
                query[None, None, head, begin:end].double(),
                keys[None, None, :end],
                values[None, None, :end],
                attn_mask=positions[begin:end, None] >= positions[:end],
            )[0, 0]
    return out


class Cache:
    """A physical cache in which a prompt lies as a table says, other numbers everywhere else.

    Attributes:
        table: int64, of shape (blocks of the prompt,), on the device.
        keys, values: of shape (kv_heads, num_blocks * block_size, head_dim).
    """

    def __init__(
        self, table: Sequence[int], key: torch.Tensor, value: torch.Tensor, shape: Shape
    ) -> None:
        """``key`` and ``value`` have the shape (kv_heads, blocks, block_size, head_dim)."""
        self.table = torch.tensor(table, device=key.device)
        self._shape = shape
        self._gathered = torch.empty_like(key), torch.empty_like(value)
        dice = torch.Generator(key.device).manual_seed(1)
        size = (shape.kv_heads, shape.num_blocks * shape.block_size, shape.head_dim)
        self.keys, self.values = (
            torch.randn(size, generator=dice, dtype=key.dtype, device=key.device) for _ in range(2)
        )
        for cache, logical in ((self.keys, key), (self.values, value)):
            self._by_block(cache)[:, self.table] = logical

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prompt, in its order; overwritten by the next call."""
        for cache, out in zip((self.keys, self.values), self._gathered, strict=True):
            torch.index_select(self._by_block(cache), 1, self.table, out=out)
        return self._gathered

    def gathered_bytes(self) -> int:
        """Read and written by ``gather``."""
        return 2 * sum(int(each.nbytes) for each in self._gathered)

    def mask(self, prompt: int, tile: int, table: torch.Tensor | None = None) -> BlockMask:
        """Of the prompt; with another table, one that leads to wrong blocks."""
        return block_mask(
            self.table if table is None else table,
            prompt,
            num_blocks=self._shape.num_blocks,
            block_size=self._shape.block_size,
            tile=tile,
        )

    def _by_block(self, cache: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        return cache.view(shape.kv_heads, shape.num_blocks, shape.block_size, shape.head_dim)


class Prompt:
    """Queries, keys and values of one prompt, its answer, and a cache for each table."""

    def __init__(
        self, tokens: int, tables: dict[str, list[int]], shape: Shape, dtype: str, device: str
    ) -> None:
        self.tokens = tokens
        self._tolerance = TOLERANCE[dtype]
        self._gqa = shape.heads != shape.kv_heads
        blocks = len(tables[ID_ORDER])
        dice = torch.Generator(device).manual_seed(0)

        def numbers(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=dice, device=device).to(getattr(torch, dtype))

        # Four times as large as keys: heads that pick single tokens out of a long prompt, so that
        # one wrong block is not averaged away.
        self._query = numbers(shape.heads, tokens, shape.head_dim) * 4
        size = (shape.kv_heads, blocks, shape.block_size, shape.head_dim)
        self._key, self._value = numbers(*size), numbers(*size)
        self._answer = reference(
            self._query, *(each.flatten(1, 2)[:, :tokens] for each in (self._key, self._value))
        )
        self.caches = {
            name: Cache(table, self._key, self._value, shape) for name, table in tables.items()
        }

    def check_gather(self, name: str) -> None:
        key, value = self.caches[name].gather()
        if not (torch.equal(key, self._key) and torch.equal(value, self._value)):
            raise RuntimeError(f"{name}: what was gathered is not what was written")

    def attention(self, kernel: Any, name: str, mask: BlockMask) -> torch.Tensor:
        """The output of the compiled FlexAttention, shape (1, heads, tokens, head_dim)."""
        cache = self.caches[name]
        _, tile = mask.BLOCK_SIZE
        # As vLLM's backend: what a Triton kernel computes at a time has to divide the tile.
        most = 32 if self._query.dtype == torch.float32 else 64
        return kernel(
            self._query[None],
            cache.keys[None],
            cache.values[None],
            block_mask=mask,
            enable_gqa=self._gqa,
            kernel_options={
                "FORCE_USE_FLEX_ATTENTION": True,
                "BLOCK_M": QUERY_TILE,
                "BLOCK_N": min(most, tile),
            },
        )

    def error(self, out: torch.Tensor) -> float:
        return float((out[0].double() - self._answer).abs().max())

    def agrees(self, out: torch.Tensor) -> bool:
        return self.error(out) <= self._tolerance

    def check_attention(self, kernel: Any, tile: int, masks: dict[str, BlockMask]) -> None:
        """Each output is right, and the first one is wrong with two blocks exchanged."""
        for name, mask in masks.items():
            out = self.attention(kernel, name, mask)
            if not self.agrees(out):
                raise RuntimeError(
                    f"{name}, prompt {self.tokens}, KV tile {tile}: the output is off by "
                    f"{self.error(out):.1e} from attention in float64; {self._tolerance:.0e} is "
                    "allowed"
                )
        exchanged = self.caches[ID_ORDER].table.clone()
        exchanged[:2] = exchanged[:2].flip(0)
        wrong = self.caches[ID_ORDER].mask(self.tokens, tile, exchanged)
        if self.agrees(self.attention(kernel, ID_ORDER, wrong)):
            raise RuntimeError(
                f"prompt {self.tokens}, KV tile {tile}: the check of the output sees no difference "
                "between a table and one with two blocks exchanged"
            )


def seconds(device: str, call: Callable[[], object]) -> float:
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(
    device: str,
    repeats: int,
    calls: Mapping[str, Callable[[], object]],
    before: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Times of each call, after one that does not count, and ratios to the table in id order.

    ``before`` is called before each call; its time does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            before()
            took = seconds(device, call)
            if repeat:
                times[name].append(took)
    base = times[ID_ORDER]
    return {
        name: {
            "seconds": spread(each),
            "ratio": statistics.median(each) / statistics.median(base),
            "ratio_quartiles": spread([a / b for a, b in zip(each, base, strict=True)])[
                "quartiles"
            ],
        }
        for name, each in times.items()
    }


def spread(numbers: Sequence[float]) -> dict[str, Any]:
    low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return {"median": statistics.median(numbers), "quartiles": [low, high]}


def measure_prefill(
    prompt: Prompt, tile: int, repeats: int, device: str, block_size: int
) -> list[dict[str, Any]]:
    """A row for each table."""
    torch.compiler.reset()  # PyTorch keeps only a few kernels of one function
    kernel = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    masks = {name: cache.mask(prompt.tokens, tile) for name, cache in prompt.caches.items()}
    prompt.check_attention(kernel, tile, masks)

    def computed(name: str) -> Callable[[], object]:
        return lambda: prompt.attention(kernel, name, masks[name])

    found = in_turn(device, repeats, {name: computed(name) for name in masks})
    rows = []
    for name, figures in found.items():
        contiguity = Contiguity(tile // block_size)
        contiguity.add(prompt.caches[name].table.cpu().numpy())
        rows.append(
            {
                "prompt": prompt.tokens,
                "tile": tile,
                "table": name,
                "tile_amplification": contiguity.tile_amplification,
                "visits": visits(masks[name]),
                "visits_ratio": visits(masks[name]) / visits(masks[ID_ORDER]),
                **figures,
            }
        )
    return rows


def measure_gather(prompt: Prompt, repeats: int, device: str) -> list[dict[str, Any]]:
    """A row for each table."""
    for name in prompt.caches:
        prompt.check_gather(name)
    others = torch.empty(OTHER_BYTES, dtype=torch.int8, device=device)
    calls = {name: cache.gather for name, cache in prompt.caches.items()}
    found = in_turn(device, repeats, calls, before=others.zero_)
    rows = []
    for name, figures in found.items():
        contiguity = Contiguity(1)
        contiguity.add(prompt.caches[name].table.cpu().numpy())
        moved = prompt.caches[name].gathered_bytes()
        rows.append(
            {
                "prompt": prompt.tokens,
                "table": name,
                "blocks_per_run": contiguity.blocks_per_run,
                "bytes": moved,
                "gb_per_second": moved / figures["seconds"]["median"] / 1e9,
                **figures,
            }
        )
    return rows


def report(console: Console, results: dict[str, Any]) -> None:
    def timed(row: dict[str, Any], unit: float) -> list[str]:
        low, high = (each * unit for each in row["seconds"]["quartiles"])
        least, most = row["ratio_quartiles"]
        middle = row["seconds"]["median"] * unit
        return [
            f"{middle:,.1f}",
            f"{low:,.1f} to {high:,.1f}",
            f"{row['ratio']:.2f}x",
            f"{least:.2f} to {most:.2f}",
        ]

    shown = Table(title=f"prefill, compiled FlexAttention on {results['device']}")
    columns = ["tile amplification", "visits", "ms", "quartiles", "ratio", "quartiles"]
    for column in ["prompt", "KV tile", "table", *columns]:
        shown.add_column(column, justify="left" if column == "table" else "right")
    before = None
    for row in results["prefill"]:
        if before not in (None, (row["prompt"], row["tile"])):
            shown.add_section()
        before = row["prompt"], row["tile"]
        shown.add_row(
            f"{row['prompt']:,}",
            str(row["tile"]),
            row["table"],
            f"{row['tile_amplification']:.2f}",
            f"{row['visits_ratio']:.2f}x",
            *timed(row, 1e3),
        )
    console.print(shown)
    shown = Table(title=f"gather of keys and values on {results['device']}")
    columns = ["blocks a run", "GB/s", "us", "quartiles", "ratio", "quartiles"]
    for column in ["prompt", "table", *columns]:
        shown.add_column(column, justify="left" if column == "table" else "right")
    for row in results["gather"]:
        shown.add_row(
            f"{row['prompt']:,}",
            row["table"],
            f"{row['blocks_per_run']:.1f}",
            f"{row['gb_per_second']:.1f}",
            *timed(row, 1e6),
        )
    console.print(shown)
    if results["trace"]:
        console.print(f"trace: {results['trace']}")


def parse_options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, TracedTable | None]:
    """What is asked for, in full, and the table of the trace, if one is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=sorted(DEFAULTS), default="cpu")
    parser.add_argument(
        "--dtype", choices=sorted(TOLERANCE), help="float32 on a CPU, bfloat16 on a GPU"
    )
    parser.add_argument("--prompts", type=_count, nargs="+", metavar="TOKENS")
    parser.add_argument("--tiles", type=_count, nargs="+", metavar="TOKENS", help="KV tiles")
    parser.add_argument("--heads", type=_count, help="of the queries")
    parser.add_argument("--kv-heads", type=_count, help="fewer than --heads: grouped queries")
    parser.add_argument("--head-dim", type=_count)
    parser.add_argument(
        "--blocks",
        type=_count,
        help="in the pool; with --trace, that of its engine. Each table gets a cache of that size",
    )
    parser.add_argument("--block-size", type=_count, default=16, help="default: %(default)s tokens")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a block trace, for its tables")
    parser.add_argument("--repeats", type=_count)
    parser.add_argument("--seed", type=int, default=40244, help="of tables; default: %(default)s")
    parser.add_argument("--short", action="store_true", help="one prompt, two tiles, few repeats")
    parser.add_argument("--out", type=Path, metavar="FILE", help="bench/results/kernel_DEVICE.json")
    options = parser.parse_args(arguments)
    try:
        traced = _fill_in(options)
    except (TraceError, ValueError, OSError) as error:
        parser.error(str(error))
    return options, traced


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: 1 or more")
    return number


def _fill_in(options: argparse.Namespace) -> TracedTable | None:
    """Set what was left out, and check all of it.

    Raises:
        ValueError: it cannot be measured; the message says what can.
        TraceError, OSError: as ``longest_table``.
    """
    defaults = DEFAULTS[options.device]
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch finds no GPU; --device cpu needs none")
    for name in ("dtype", "heads", "kv_heads", "head_dim"):
        setattr(options, name, getattr(options, name) or getattr(defaults, name))
    options.tiles = options.tiles or (SHORT_TILES if options.short else TILES)
    options.repeats = options.repeats or (
        defaults.short_repeats if options.short else defaults.repeats
    )
    options.out = options.out or RESULTS / f"kernel_{options.device}.json"
    prompts = list(defaults.prompts[: 1 if options.short else None])
    num_blocks, traced = defaults.num_blocks, None
    if options.trace:
        traced = longest_table(options.trace, options.block_size, options.blocks)
        whole_tiles = max(options.tiles) // options.block_size or 1
        num_blocks = -(-traced.num_blocks // whole_tiles) * whole_tiles
        prompts = [len(traced.blocks) * options.block_size // QUERY_TILE * QUERY_TILE]
    options.prompts = options.prompts or prompts
    options.blocks = options.blocks or num_blocks
    _check(options, traced)
    return traced


def _check(options: argparse.Namespace, traced: TracedTable | None) -> None:
    block_size, num_blocks = options.block_size, options.blocks
    if options.heads % options.kv_heads:
        raise ValueError(f"{options.heads} heads cannot share {options.kv_heads} KV heads evenly")
    if options.repeats < 2:
        raise ValueError("--repeats: 2 or more, for there is a spread to tell")
    for tile in options.tiles:
        if tile < 16 or tile & (tile - 1):
            raise ValueError(f"a KV tile of {tile}: take a power of two from 16 on")
        if tile % block_size:
            raise ValueError(f"a KV tile of {tile} is no multiple of the block size, {block_size}")
        if num_blocks * block_size % tile:
            blocks = tile // block_size
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens are no multiple of a KV tile of "
                f"{tile}, and PyTorch's code generator for CPUs fails on such caches: take "
                f"--blocks {-(-num_blocks // blocks) * blocks}"
            )
    for prompt in options.prompts:
        if prompt % QUERY_TILE:
            raise ValueError(
                f"a prompt of {prompt} tokens is no multiple of {QUERY_TILE}, and PyTorch's code "
                f"generator for CPUs fails on such prompts: take {-(-prompt // 16) * 16}"
            )
        blocks = -(-prompt // block_size)
        if blocks < 2:
            raise ValueError(f"a prompt of {prompt} tokens has less than two blocks: take a longer")
        if blocks >= num_blocks:
            raise ValueError(
                f"a prompt of {prompt} tokens takes {blocks} blocks, and {num_blocks - 1} of "
                f"{num_blocks} can be used: take more --blocks or a shorter prompt"
            )
        if traced and blocks > len(traced.blocks):
            raise ValueError(
                f"a prompt of {prompt} tokens takes {blocks} blocks, and the longest table is "
                f"{traced.description}: take shorter --prompts"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    options, traced = parse_options(arguments)
    shape = Shape(
        options.heads, options.kv_heads, options.head_dim, options.block_size, options.blocks
    )
    results: dict[str, Any] = {"prefill": [], "gather": []}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(options.prompts) * (1 + len(options.tiles)))
        for tokens in options.prompts:
            blocks = -(-tokens // shape.block_size)
            tables = made_tables(blocks, shape.num_blocks, options.seed)
            if traced:
                tables["trace"] = traced.blocks[:blocks]
            bar.update(task, description=f"prompt {tokens}, gather")
            prompt = Prompt(tokens, tables, shape, options.dtype, options.device)
            results["gather"] += measure_gather(prompt, 3 * options.repeats, options.device)
            bar.advance(task)
            for tile in options.tiles:
                bar.update(task, description=f"prompt {tokens}, KV tile {tile}")
                results["prefill"] += measure_prefill(
                    prompt, tile, options.repeats, options.device, shape.block_size
                )
                bar.advance(task)
    results = {
        # Last: it imports vLLM where there is one, which changes settings of PyTorch's compiler.
        **provenance(),
        "device": options.device,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "shape": asdict(shape),
        "query_tile": QUERY_TILE,
        "seed": options.seed,
        "repeats": options.repeats,
        "trace": traced.description if traced else None,
        "correct": True,  # or there would have been an error
        **results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    report(Console(width=120), results)


if __name__ == "__main__":
    main()
