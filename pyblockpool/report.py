"""Block traces -> figures per round and in all.

A *round* is what lies between two resets that were done, of the prefix cache or of the order. A
trace without any is one round if it is short, else stretches with the same number of requests.

A request counts once, when it ends, with its prompt, and with the prefix hits and the latency that
it had first: after a preemption it finds blocks of its own. Its block table counts whenever it
loses it: when it ends, and each time it is preempted, because so long the engine read it. Two parts
of a table are looked at:

- the *prompt*: the blocks that the tokens of the prompt fill. They are what prefill computes and
  reads, so that they, and not the rest, go with its latency;
- the *whole* table at that moment, with the blocks in which the answer grew: what decoding reads in
  the end, and what a copy of the request moves.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pyblockpool.block_trace import Group, Header, Request, Section
from pyblockpool.contiguity import Contiguity, Table
from pyblockpool.trace_writer import PREEMPTED

# As much of the cache as FlexAttention's kernels take at once.
TILE_TOKENS = 128

# Without resets: from so many requests on, so many stretches.
MANY_REQUESTS = 64
STRETCHES = 8

# Outcomes of requests that did not come to their end.
ABORTED = ("abort", "error")


@dataclass(frozen=True)
class Choices:
    """How to look at a trace.

    Attributes:
        tile_tokens: asked for in a tile. As many whole blocks as fit into them, at least one, are a
            tile: `GroupFigures.tile_tokens`.
        rounds: stretches with the same number of requests into which each trace is split, instead
            of at its resets. None: at its resets, and without any as many as suit it.
        regions: of memory in which each block has a part, for the number of copies.

    Raises:
        ValueError: one of them is less than 1.
    """

    tile_tokens: int = TILE_TOKENS
    rounds: int | None = None
    regions: int = 1

    def __post_init__(self) -> None:
        for name in ("tile_tokens", "rounds", "regions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass
class TableFigures:
    """Block tables, or parts of them, of one KV-cache group.

    Attributes:
        contiguity: sums over all of them, and ratios.
        blocks_per_run: of each that has a block.
    """

    contiguity: Contiguity
    blocks_per_run: array[float] = field(default_factory=lambda: array("d"))

    def add(self, table: Table) -> None:
        blocks, runs = self.contiguity.blocks, self.contiguity.runs
        self.contiguity.add(table)
        if self.contiguity.runs > runs:
            blocks_in_it = self.contiguity.blocks - blocks
            self.blocks_per_run.append(blocks_in_it / (self.contiguity.runs - runs))

    @property
    def median_blocks_per_run(self) -> float:
        """Half of the tables have more, half of them less; nan without tables."""
        return _median(self.blocks_per_run)

    def as_json(self, regions: int) -> dict[str, Any]:
        """Sums and ratios by name; None for what there is not."""
        median = or_none(self.median_blocks_per_run)
        return {"median_blocks_per_run": median, **contiguity_as_json(self.contiguity, regions)}


def contiguity_as_json(seen: Contiguity, regions: int = 1) -> dict[str, Any]:
    """Sums over tables and ratios, by name; None for what there is not."""
    return {
        "tile": seen.tile,
        "tables": seen.tables,
        "blocks": seen.blocks,
        "runs": seen.runs,
        "longest_run": seen.longest_run,
        "tiles": seen.tiles,
        "packed_tiles": seen.packed_tiles,
        "descriptors": seen.descriptors(regions),
        "blocks_per_run": or_none(seen.blocks_per_run),
        "mergeable_share": or_none(seen.mergeable_share),
        "mergeable_share_either": or_none(seen.mergeable_share_either),
        "tile_amplification": or_none(seen.tile_amplification),
    }


@dataclass
class GroupFigures:
    """One KV-cache group.

    Attributes:
        group: what it is.
        prompts: the parts of tables that prompts fill.
        tables: whole tables.
    """

    group: Group
    prompts: TableFigures
    tables: TableFigures

    @property
    def tile_tokens(self) -> int:
        """Tokens in a tile: whole blocks, so that they need not be what was asked for."""
        return self.tables.contiguity.tile * self.group.block_size

    def as_json(self, regions: int) -> dict[str, Any]:
        """The tokens of a tile, and the figures by name."""
        return {
            "tile_tokens": self.tile_tokens,
            "prompts": self.prompts.as_json(regions),
            "tables": self.tables.as_json(regions),
        }


class Figures:
    """A round, or all of a trace.

    Attributes:
        finished, aborted: requests that came to their end, and those that were aborted or failed.
        preempted: times that a request was preempted.
        prompt_tokens, hit_tokens: of requests that ended; those of them that were found in the
            prefix cache.
        prefill: seconds from being scheduled to the first token, of requests that ended and had
            one.
        used_blocks: blocks of the pool that were in a table.
        highest_block: the highest of them, 0 if there is none.
        groups: figures of the tables, for each KV-cache group.
    """

    def __init__(self, header: Header, tile_tokens: int) -> None:
        self.finished = self.aborted = self.preempted = 0
        self.prompt_tokens = self.hit_tokens = 0
        self.prefill = array("d")
        self.used_blocks = self.highest_block = 0
        self.groups: list[GroupFigures] = []
        for group in header.groups:
            tile = max(1, tile_tokens // group.block_size)
            prompts, tables = TableFigures(Contiguity(tile)), TableFigures(Contiguity(tile))
            self.groups.append(GroupFigures(group, prompts, tables))

    def add(self, request: Request, holders: Table) -> None:
        """Add a request's table in one group; with the first of them, the request.

        Args:
            request: of the engine of the header.
            holders: for each block of the pool, who held it last in what was added so far, -1 for
                nobody, else the number of a record from 0 on. It is brought up to date.
        """
        if request.leads:
            if request.outcome == PREEMPTED:
                self.preempted += 1
            else:
                self.aborted += request.outcome in ABORTED
                self.finished += request.outcome not in ABORTED
                self.prompt_tokens += request.prompt
                self.hit_tokens += request.hit
                if request.prefill is not None:
                    self.prefill.append(request.prefill)
        group = self.groups[request.group]
        group.tables.add(request.table)
        group.prompts.add(request.prompt_table(group.group.block_size))
        blocks = request.table[request.table > 0]
        if len(blocks):
            self.used_blocks += len(set(blocks[holders[blocks] < 0].tolist()))
            self.highest_block = max(self.highest_block, int(blocks.max()))
            holders[blocks] = self.finished + self.aborted + self.preempted - 1

    @property
    def requests(self) -> int:
        """Requests that ended."""
        return self.finished + self.aborted

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache; nan without any."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else math.nan

    @property
    def prefill_ms(self) -> float:
        """Mean latency of prefill in milliseconds; nan without any."""
        return 1000 * sum(self.prefill) / len(self.prefill) if self.prefill else math.nan

    @property
    def median_prefill_ms(self) -> float:
        """Half of the requests were faster, half of them slower; nan without any."""
        return 1000 * _median(self.prefill)

    @property
    def high_water_ratio(self) -> float:
        """The highest block that was used, over the number of blocks that were; nan without any.

        1 where the pool was filled from its lower end; how far from it blocks were scattered else.
        """
        return self.highest_block / self.used_blocks if self.used_blocks else math.nan

    def as_json(self, regions: int) -> dict[str, Any]:
        """Counts, ratios and milliseconds by name; None for what there is not."""
        return {
            "finished": self.finished,
            "aborted": self.aborted,
            "preempted": self.preempted,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": or_none(self.hit_rate),
            "prefill_ms": or_none(self.prefill_ms),
            "median_prefill_ms": or_none(self.median_prefill_ms),
            "used_blocks": self.used_blocks,
            "highest_block": self.highest_block,
            "high_water_ratio": or_none(self.high_water_ratio),
            "groups": [group.as_json(regions) for group in self.groups],
        }


class EngineFigures:
    """The life of one engine, split into rounds.

    Its memory grows with the number of rounds and the size of the pool, with the requests that are
    preempted at a time, and by some numbers a request, for the medians; not with the tables.

    Attributes:
        label: a short name.
        header: what ran.
        rounds: with at least one record each.
        all: of them together.
        first_holders, last_holders: of the first and of the last round, for each block of the pool:
            the number in its round, from 0 on, of the record that held it last; -1 if none did.
        split: how it was split, in words.
    """

    def __init__(
        self, label: str, header: Header, tile_tokens: int, requests: int = 0, stretches: int = 0
    ) -> None:
        """
        Args:
            label: a short name.
            header: what ran.
            tile_tokens: tokens in a tile.
            requests: that will end, where they are split into stretches.
            stretches: how many. 0: ``end_round`` tells where a round ends.
        """
        self.label, self.header = label, header
        self.rounds: list[Figures] = []
        self.all = Figures(header, tile_tokens)
        nobody = np.full(header.num_blocks, -1, np.int32)
        self.first_holders, self.last_holders = nobody, nobody
        self._all_holders = nobody.copy()
        self._tile_tokens = tile_tokens
        # Of requests that were preempted and will end: prefix hits, and seconds of their prefill.
        self._begun: dict[str, tuple[int, float | None]] = {}
        self._requests, self._stretches = requests, stretches
        self._round_has_ended = True

    def end_round(self) -> None:
        """What is added from now on belongs to another round."""
        self._round_has_ended = True

    def add(self, request: Request) -> None:
        """Add a record, in the order of the trace."""
        if request.leads and request.outcome != PREEMPTED and self._stretch_begins():
            self._round_has_ended = True
        if self._round_has_ended:
            self.rounds.append(Figures(self.header, self._tile_tokens))
            self.last_holders = np.full(self.header.num_blocks, -1, np.int32)
            if len(self.rounds) == 1:
                self.first_holders = self.last_holders
            self._round_has_ended = False
        if request.leads:
            request = self._as_it_began(request)
        self.rounds[-1].add(request, self.last_holders)
        self.all.add(request, self._all_holders)

    def _as_it_began(self, request: Request) -> Request:
        """With the hits and the latency of the first time that it was scheduled."""
        hit, prefill = self._begun.pop(request.request, (request.hit, None))
        if prefill is None:
            prefill = request.prefill
        if request.outcome == PREEMPTED:
            self._begun[request.request] = hit, prefill
        return replace(request, hit=hit, prefill=prefill)

    def _stretch_begins(self) -> bool:
        ended = self.all.requests
        stretch, before = (
            number * self._stretches // max(1, self._requests) for number in (ended, ended - 1)
        )
        return ended > 0 and stretch > before

    @property
    def split(self) -> str:
        if len(self.rounds) < 2:
            return "one round"
        if not self._stretches:
            return f"{len(self.rounds)} rounds between resets"
        return f"{len(self.rounds)} stretches with the same number of requests"

    def as_json(self, regions: int) -> dict[str, Any]:
        """All of it with plain names and values."""
        return {
            "label": self.label,
            "header": asdict(self.header),
            "split": self.split,
            "rounds": [figures.as_json(regions) for figures in self.rounds],
            "all": self.all.as_json(regions),
        }


def engine_figures(
    section: Section,
    label: str,
    choices: Choices,
    progress: Callable[[int], None] = lambda read: None,
) -> EngineFigures:
    """Read a section again, and add up its figures; its tables are not kept in memory.

    Args:
        section: of a trace that was read once.
        label: a short name of it.
        choices: how to look at it.
        progress: called with the number of bytes that were read, again and again.

    Raises:
        TraceError: the file has changed.
        OSError: the file cannot be read.
    """
    stretches = choices.rounds or 0
    if not stretches and section.rounds < 2:
        stretches = STRETCHES if section.requests >= MANY_REQUESTS else 1
    engine = EngineFigures(label, section.header, choices.tile_tokens, section.requests, stretches)
    for record in section.records(progress):
        if isinstance(record, Request):
            engine.add(record)
        elif record.done and not stretches:
            engine.end_round()
    return engine


def labels(sections: Sequence[Section]) -> list[str]:
    """A short name for each section: that of its file, with a number where it has several."""
    names = [_shown(section.path.name) for section in sections]
    paths = {section.path.resolve() for section in sections}
    if len({path.name for path in paths}) < len(paths):
        names = [_shown(str(section.path)) for section in sections]
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} #{seen[name]}" if names.count(name) > 1 else name)
    return found


def _shown(name: str) -> str:
    """The name of a file as text that can be drawn: it may be any bytes."""
    return name.encode(errors="backslashreplace").decode().removesuffix(".jsonl")


def _median(values: array[float]) -> float:
    return float(np.median(np.frombuffer(values))) if values else math.nan


def or_none(value: float) -> float | None:
    """For JSON, which knows no nan."""
    return None if math.isnan(value) else value
