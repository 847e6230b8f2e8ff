"""Block traces: files that an engine has written -> its requests and their block tables.

``VLLM_BLOCK_TRACE=FILE`` makes an engine core append to FILE, a JSON object a line: a *header* with
what runs, then a line for each KV-cache group of each request that ends or is preempted, a line for
each reset, and an *end*. From header to end is a *section*: the life of one engine. A file may have
several. Where the end is missing, the recording goes on (in the last section of a file only); or
its process ended before the line was written, as it was killed (at shutdown by vLLM, too) or has
crashed; or the line could not be written, to a full disk, say. Then the last records may be
missing, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from pyblockpool.contiguity import Table
from pyblockpool.errors import TraceError
from pyblockpool.trace_writer import FORMAT, PREEMPTED

_HEADER = b'{"block_trace"'

# A header is short. What has no end of line within this many bytes is no trace.
_LONGEST_HEADER = 1 << 20

# In blocks, null blocks included: some hundred million tokens.
_LONGEST_TABLE = 1 << 24


@dataclass(frozen=True)
class Group:
    """A KV-cache group.

    Attributes:
        block_size: tokens in a block, as the engine has resolved it.
        kind: name of the class of vLLM's KV-cache specification.
        layers: that share its block tables.
    """

    block_size: int
    kind: str
    layers: int


@dataclass(frozen=True)
class Header:
    """What runs.

    Attributes:
        pyblockpool, vllm: versions.
        queue: value of VLLM_BLOCK_QUEUE, None where it was not set.
        policy: of the queue that is in the pool: lru (vLLM's own, too), sorted or extent.
        implementation: vllm, native, or the name of somebody else's class.
        extent: blocks in an extent, None for other policies.
        model, attention: the model and its attention backend, None where that is not known.
        pid: of the engine core.
        dp_rank: of a data-parallel engine, else None.
        started: date and time, ISO 8601.
        num_blocks: in the pool, the null block included.
        caching: whether prefixes are cached.
        groups: KV-cache groups, which share the pool.
    """

    pyblockpool: str
    vllm: str
    queue: str | None
    policy: str
    implementation: str
    extent: int | None
    model: str | None
    attention: str | None
    pid: int
    dp_rank: int | None
    started: str
    num_blocks: int
    caching: bool
    groups: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """One request that has ended, or was preempted, and its block table in one group.

    Attributes:
        t: seconds since the header.
        request: vLLM's id of it.
        outcome: vLLM's reason, in lower case: stop, length, abort, error, preempted, ...
        group: index of the KV-cache group.
        prompt: tokens of the prompt.
        tokens: that the table was for.
        hit: tokens that were found in the prefix cache.
        prefill: seconds from the moment in which it was scheduled to the first token; None if there
            was none.
        table: block ids, int32 of shape (positions,). Block 0 is the null block, which stands for
            positions that are not kept.
        leads: it is the first of its record, which has one for each group that has blocks of the
            pool: not always group 0, which may be a tier in host memory.
    """

    t: float
    request: str
    outcome: str
    group: int
    prompt: int
    tokens: int
    hit: int
    prefill: float | None
    table: Table
    leads: bool = True

    def prompt_table(self, block_size: int) -> Table:
        """The part of the table that the prompt fills, with blocks of so many tokens."""
        return self.table[: -(-self.prompt // block_size)]


@dataclass(frozen=True)
class Reset:
    """A reset of the prefix cache or of the order.

    Attributes:
        t: seconds since the header.
        reset: prefix_cache or order.
        done: False where it was refused.
    """

    t: float
    reset: str
    done: bool


@dataclass(frozen=True)
class End:
    """The last line of a section.

    Attributes:
        t: seconds since the header.
        end: why: closed, or size limit.
        requests: records of requests that were written.
        lost: records that could not be.
    """

    t: float
    end: str
    requests: int
    lost: int


@dataclass
class Section:
    """The life of one engine in a file that was read to its end once, and is not kept in memory.

    Attributes:
        path: the file.
        line: number of the header's line, from 1 on.
        start, stop: bytes of the file from behind the header to the end of the section.
        header: what runs.
        requests: that have ended. A preempted one does not count: it will end later.
        preemptions: of requests.
        rounds: stretches with a record in them, between resets that were done.
        cut: numbers of lines that are no JSON: cut off by a crash or a full disk, or still being
            written. They are left out.
        end: the last line; None where there is none, for the reasons that the module gives.
    """

    path: Path
    line: int
    start: int
    stop: int
    header: Header
    requests: int = 0
    preemptions: int = 0
    rounds: int = 0
    cut: list[int] = field(default_factory=list)
    end: End | None = None

    def records(
        self, progress: Callable[[int], None] = lambda read: None
    ) -> Iterator[Request | Reset]:
        """Read the section again: what ended, and the resets, in the order of the file.

        Args:
            progress: called with the number of bytes that were read, again and again.

        Raises:
            TraceError: the file has changed.
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self.start)
            for line in _lines(file, self.path, self.line + 1, self.start, self.header):
                if line.start >= self.stop:
                    return
                progress(line.end - line.start)
                if isinstance(line.content, Request | Reset):
                    yield line.content


def read_sections(path: Path, progress: Callable[[int], None] = lambda read: None) -> list[Section]:
    """Read a block trace, line by line, and check it; its tables are not kept in memory.

    Lines that are not whole are left out, and the sections tell their numbers. Keys that are not
    known are ignored.

    Args:
        path: an ordinary file: it is read again later.
        progress: called with the number of bytes that were read, again and again.

    Raises:
        TraceError: not a block trace, one of another format, or a line that makes no sense.
        OSError: the file cannot be read.
    """
    sections: list[Section] = []
    cut: list[int] = []  # before the first header that is whole
    between_resets = True
    with path.open("rb") as file:
        _refuse_other_files(path, file)
        for line in _lines(file, path, 1, 0, None):
            progress(line.end - line.start)
            content = line.content
            if isinstance(content, Header):
                sections.append(Section(path, line.number, line.end, line.end, content, cut=cut))
                cut, between_resets = [], True
                continue
            if content is None:
                (sections[-1].cut if sections else cut).append(line.number)
            if not sections:
                continue
            section = sections[-1]
            section.stop = line.end
            if isinstance(content, Request):
                section.rounds += between_resets
                between_resets = False
                if content.leads:
                    section.preemptions += content.outcome == PREEMPTED
                    section.requests += content.outcome != PREEMPTED
            elif isinstance(content, Reset):
                between_resets |= content.done
            elif isinstance(content, End):
                section.end = content
    if not sections:
        raise TraceError(f"{path}:1: the header is cut off, and without it nothing can be read")
    return sections


def _refuse_other_files(path: Path, file: BufferedReader) -> None:
    if not file.seekable():
        raise TraceError(f"{path}: a pipe, and traces are read twice: save it in a file first")
    first = file.readline(_LONGEST_HEADER)
    file.seek(0)
    if not first:
        raise TraceError(f"{path}: the file is empty: no engine has written to it yet")
    row = _decoded(first)
    known = first.startswith(_HEADER) if row is None else row.keys() & {"block_trace", "t"}
    if not known or len(first) == _LONGEST_HEADER:
        raise TraceError(
            f"{path}: not a block trace, that is, a file that an engine has written under "
            "VLLM_BLOCK_TRACE; `pyblockpool replay` reads request traces"
        )


@dataclass(frozen=True)
class _Line:
    """A line that is not blank.

    Attributes:
        number: from 1 on.
        start, end: its bytes in the file.
        content: None where it is no JSON.
    """

    number: int
    start: int
    end: int
    content: Header | Request | Reset | End | None


def _lines(
    file: BufferedReader, path: Path, first: int, start: int, header: Header | None
) -> Iterator[_Line]:
    """The lines from number ``first`` on, which begins at byte ``start``."""
    before: Request | None = None
    for number, raw in enumerate(file, first):
        end = start + len(raw)
        row = _decoded(raw)
        if row is None and (at := raw.rfind(_HEADER)) > 0:
            # An engine died in the middle of a line, and the next one has begun right behind it.
            yield _Line(number, start, start + at, None)
            start, row = start + at, _decoded(raw[at:])
        if row is not None:
            try:
                content = _parsed(row, header)
            except ValueError as error:
                raise TraceError(f"{path}:{number}: {error}") from error
            if isinstance(content, Header):
                header, before = content, None
            elif isinstance(content, Request):
                if before is not None and _goes_on(before, content):
                    content = replace(content, leads=False)
                before = content
            yield _Line(number, start, end, content)
        elif raw.strip():
            yield _Line(number, start, end, None)
        start = end


def _goes_on(before: Request, request: Request) -> bool:
    """Whether that is the same record in another KV-cache group."""
    same = (before.t, before.request) == (request.t, request.request)
    return same and before.group < request.group


Row: TypeAlias = dict[str, Any]


def _decoded(raw: bytes) -> Row | None:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _parsed(row: Row, header: Header | None) -> Header | Request | Reset | End:
    if "block_trace" in row:
        return _header(row)
    if header is None:
        raise ValueError("no header before it: the beginning of the file is missing")
    if "request" in row:
        return _request(row, header)
    if "reset" in row:
        return Reset(_seconds(row, "t"), _text(row, "reset"), _flag(row, "done"))
    if "end" in row:
        return End(
            _seconds(row, "t"), _text(row, "end"), _count(row, "requests"), _count(row, "lost")
        )
    raise ValueError(
        f"neither a header, a request, a reset nor an end, but a line with {', '.join(row)}"
    )


def _header(row: Row) -> Header:
    if row["block_trace"] != FORMAT:
        raise ValueError(
            f"a block trace of format {row['block_trace']!r}, written by pyblockpool "
            f"{row.get('pyblockpool', '(it does not say which)')}: read it with that one; here, "
            f"format {FORMAT} is read"
        )
    groups = row.get("groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise ValueError(f"groups is {groups!r}, not a list of KV-cache groups")
    return Header(
        pyblockpool=_text(row, "pyblockpool"),
        vllm=_text(row, "vllm"),
        queue=_or_none(_text, row, "queue"),
        policy=_text(row, "policy"),
        implementation=_text(row, "implementation"),
        extent=_or_none(_count, row, "extent"),
        model=_or_none(_text, row, "model"),
        attention=_or_none(_text, row, "attention"),
        pid=_count(row, "pid"),
        dp_rank=_or_none(_count, row, "dp_rank"),
        started=_text(row, "started"),
        num_blocks=_count(row, "num_blocks", 1),
        caching=_flag(row, "caching"),
        groups=tuple(
            Group(_count(group, "block_size", 1), _text(group, "kind"), _count(group, "layers"))
            for group in groups
        ),
    )


def _request(row: Row, header: Header) -> Request:
    request = Request(
        t=_seconds(row, "t"),
        request=_text(row, "request"),
        outcome=_text(row, "outcome"),
        group=_count(row, "group"),
        prompt=_count(row, "prompt"),
        tokens=_count(row, "tokens"),
        hit=_count(row, "hit"),
        prefill=_or_none(_seconds, row, "prefill"),
        table=_table(row, header.num_blocks),
    )
    if request.group >= len(header.groups):
        raise ValueError(f"group is {request.group}, and the header has {len(header.groups)}")
    if len(request.table) != row.get("blocks"):
        raise ValueError(f"blocks is {row.get('blocks')!r}, but the runs have {len(request.table)}")
    return request


def _table(row: Row, num_blocks: int) -> Table:
    """Runs spelled out; those of the null block do not ascend."""
    listed = row.get("runs")
    try:
        runs = np.array(listed) if listed else np.zeros((0, 2), np.int64)
    except ValueError:  # pieces of several lengths
        runs = np.zeros(0)
    if not isinstance(listed, list) or runs.dtype != np.int64 or runs.shape[1:] != (2,):
        raise ValueError("runs is not a list of [first block, number of blocks]")
    first, counts = runs.T
    null = first == 0
    if (first < 0).any() or (counts < 1).any():
        raise ValueError("runs has a negative block, or a run without blocks")
    if (counts > np.where(null, _LONGEST_TABLE, num_blocks - first)).any():
        raise ValueError(f"runs has a block that a pool of {num_blocks} does not have")
    if counts[~null].sum() >= num_blocks or counts.sum() > _LONGEST_TABLE:
        raise ValueError(f"runs has more blocks than a table of a pool of {num_blocks} can have")
    starts = np.cumsum(counts) - counts
    table: Table = np.arange(counts.sum(), dtype=np.int32)
    table += np.repeat((first - starts).astype(np.int32), counts)
    if null.any():
        table[np.repeat(null, counts)] = 0
    return table


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not a text")
    return value


def _flag(row: Row, name: str) -> bool:
    value = row.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, neither true nor false")
    return value


def _count(row: Row, name: str, least: int = 0) -> int:
    value = row.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}, not a number from {least} on")
    return value


def _seconds(row: Row, name: str) -> float:
    value: Any = row.get(name)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, not a number of seconds")
    return float(value)


Value = TypeVar("Value")


def _or_none(take: Callable[[Row, str], Value], row: Row, name: str) -> Value | None:
    return None if row.get(name) is None else take(row, name)
