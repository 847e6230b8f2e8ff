"""Request traces: files -> the requests to be replayed.

Public traces tell by ids of blocks of tokens which prefixes prompts share. Here an id becomes as
many token ids, the same wherever it comes: equal prefixes are equal tokens, and nothing else is.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyblockpool.errors import TraceError

ARRANGEMENTS = ("time", "rotation")

# Agentic traces number the blocks of each session from 0.
_SESSION_IDS = 1 << 24


@dataclass(frozen=True)
class TraceRequest:
    """One request; lengths in tokens.

    Attributes:
        input_length: of the prompt.
        output_length: of the answer.
        prefix: the token ids with which the prompt begins, in pieces. What is left of the prompt,
            like the answer, occurs nowhere else.
        round: the prefix cache is reset between rounds.
        session: the requests of a session come one after another. None: this one is alone.
    """

    input_length: int
    output_length: int
    prefix: tuple[range, ...] = ()
    round: int = 0
    session: int | None = None


def read_requests(
    path: Path,
    *,
    limit: int | None = None,
    arrangement: str = "time",
    residents: int = 8,
    max_context: int | None = None,
) -> list[TraceRequest]:
    """Read a request trace; the format is told by the first line.

    - Mooncake (kvcache-ai/Mooncake, JSONL): ``input_length``, ``output_length``, ``hash_ids`` of
      512 tokens each;
    - Azure LLM inference (Azure/AzurePublicDataset, CSV): ``ContextTokens``, ``GeneratedTokens``;
    - agentic (after callanjfox/kv-cache-tester, JSONL): a line with ``session`` opens a session,
      then a line a request: ``t`` seconds, ``in``, ``out``, and ``runs``: ids of 64 tokens as
      ``[start, count, ...]``, each session's own;
    - GRPO (JSONL): ``step`` (a round), ``in``, ``out``, ``hash_ids`` of 16 tokens each.

    Args:
        path: the file.
        limit: only that many requests, None for all.
        arrangement: of sessions. ``"time"``: each of ``residents`` lanes plays sessions back to
            back, and their requests come in the order of the clock; ``"rotation"``: one request of
            each lane in turn, the worst case for LRU.
        residents: lanes of sessions.
        max_context: leave out sessions, or single requests, with a longer prompt and answer.

    Raises:
        TraceError: a line that is not of the format, a file that is none of them, or no request.
        ValueError: no such arrangement.
        OSError: the file cannot be read.
    """
    if arrangement not in ARRANGEMENTS:
        raise ValueError(f"arrangement {arrangement!r} is not one of {', '.join(ARRANGEMENTS)}")
    longest = float("inf") if max_context is None else max_context
    rows, parse = _open(path)
    requests: list[TraceRequest]
    if parse is _agentic:
        sessions = [
            session
            for session in _sessions(path, rows)
            if max(_context(request) for _, request in session) <= longest
        ]
        requests = _arranged(sessions, arrangement, residents)
    else:
        requests = [_parsed(path, number, parse, row) for number, row in rows]
        requests = [request for request in requests if _context(request) <= longest]
    if not requests:
        limited = "" if max_context is None else f" of at most {max_context} tokens"
        raise TraceError(f"{path}: no requests{limited} in it")
    return requests[:limit]


Rows = Iterator[tuple[int, Any]]


def _open(path: Path) -> tuple[Rows, Callable[[Any], TraceRequest]]:
    """The rows with their numbers, and what makes a request of one."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = text.split("\n")
    if not text.strip():
        raise TraceError(f"{path}: the file is empty")
    if {"ContextTokens", "GeneratedTokens"} <= set(lines[0].strip().split(",")):
        return enumerate(csv.DictReader(lines), 2), _azure
    lines = [line.strip() for line in lines]
    for mark, parse in (("session", _agentic), ("step", _grpo), ("input_length", _mooncake)):
        if lines[0].startswith("{") and f'"{mark}"' in lines[0]:
            return ((n, _decoded(path, n, line)) for n, line in enumerate(lines, 1) if line), parse
    raise TraceError(
        f"{path}: neither a Mooncake, an agentic or a GRPO trace (JSON lines) nor an Azure one "
        "(CSV with ContextTokens and GeneratedTokens)"
    )


def _decoded(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise TraceError(f"{path}:{number}: not a JSON object")
    return row


def _parsed(path: Path, number: int, parse: Callable[[Any], Any], row: Any) -> Any:
    try:
        return parse(row)
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}:{number}: {what}") from error


def _azure(row: dict[str, str]) -> TraceRequest:
    return _request(int(row["ContextTokens"]), int(row["GeneratedTokens"]), [])


def _mooncake(row: dict[str, Any]) -> TraceRequest:
    ids = _tokens(((h, 1) for h in row["hash_ids"]), 512)
    return _request(row["input_length"], row["output_length"], ids)


def _grpo(row: dict[str, Any]) -> TraceRequest:
    ids = _tokens(((h, 1) for h in row["hash_ids"]), 16)
    return _request(row["in"], row["out"], ids, round=_count(row["step"], "step"))


def _agentic(row: dict[str, Any]) -> TraceRequest:
    starts, counts = row["runs"][::2], row["runs"][1::2]
    session = row["session"]
    ids = _tokens(zip(starts, counts, strict=True), 64, session)
    return _request(row["in"], row["out"], ids, session=session)


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}, not a number from {least} on")
    return value


def _tokens(
    runs: Iterable[tuple[Any, Any]], span: int, session: int | None = None
) -> Iterator[range]:
    offset = 0 if session is None else session * _SESSION_IDS
    for first, count in runs:
        end = _count(first, "a block id") + _count(count, "the length of a run", 1)
        if session is not None and end > _SESSION_IDS:
            raise ValueError(f"a block id is {end - 1}, more than a session can have")
        yield range((offset + first) * span, (offset + end) * span)


def _request(
    input_length: int,
    output_length: int,
    prefix: Iterable[range],
    round: int = 0,
    session: int | None = None,
) -> TraceRequest:
    _count(input_length, "the length of the prompt", 1)
    _count(output_length, "the length of the answer")
    pieces: list[range] = []
    left = input_length
    for piece in prefix:
        if pieces and pieces[-1].stop == piece.start:
            pieces[-1] = range(pieces[-1].start, piece.stop)
        else:
            pieces.append(piece)
    cut = []
    for piece in pieces:
        cut.append(piece[:left])
        left -= len(cut[-1])
    # A prompt that is answered by nothing has still to be computed: that yields one token.
    return TraceRequest(
        input_length, max(1, output_length), tuple(p for p in cut if p), round, session
    )


def _context(request: TraceRequest) -> int:
    return request.input_length + request.output_length


Session = list[tuple[float, TraceRequest]]


def _sessions(path: Path, rows: Rows) -> Iterator[Session]:
    """Sessions, each a list of (seconds since it began, request)."""
    session: Session = []
    count = -1
    for number, row in rows:
        if "session" in row:
            count += 1
            if session:
                yield session
            session = []
        else:
            t = _parsed(path, number, lambda row: float(row["t"]), row)
            session.append((t, _parsed(path, number, _agentic, row | {"session": count})))
    if session:
        yield session


def _arranged(sessions: Sequence[Session], arrangement: str, residents: int) -> list[TraceRequest]:
    waiting = deque(sessions)
    lanes = [deque(waiting.popleft()) for _ in range(min(residents, len(waiting)))]
    starts = [0.0] * len(lanes)
    requests = []
    turn = 0
    while lanes:
        if arrangement == "time":
            turn = min(range(len(lanes)), key=lambda i: starts[i] + lanes[i][0][0])
        t, request = lanes[turn].popleft()
        requests.append(request)
        if not lanes[turn]:
            if waiting:
                lanes[turn], starts[turn] = deque(waiting.popleft()), starts[turn] + t
            else:
                del lanes[turn], starts[turn]
                turn -= 1
        turn = (turn + 1) % max(1, len(lanes))
    return requests
