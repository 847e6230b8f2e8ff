"""Request traces: four formats, what is shared between prompts, and what is refused."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from pyblockpool.errors import TraceError
from pyblockpool.request_trace import TraceRequest, read_requests


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens(request: TraceRequest) -> list[int]:
    return list(chain.from_iterable(request.prefix))


def test_mooncake(tmp_path: Path) -> None:
    """An id is 512 tokens; the last one of a prompt may be cut."""
    one, other = read_requests(
        lines(
            tmp_path / "trace",
            {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
            {"timestamp": 3, "input_length": 1536, "output_length": 9, "hash_ids": [0, 1, 5]},
        )
    )
    assert (one.input_length, one.output_length, one.session, one.round) == (1100, 7, None, 0)
    assert tokens(one) == list(range(1100))
    assert tokens(other) == [*range(1024), *range(5 * 512, 6 * 512)]


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.68,374,44\r\n"
        "2023-11-16 18:15:50.99,396,0\r\n"
    )
    assert read_requests(path) == [TraceRequest(374, 44), TraceRequest(396, 1)]


def test_grpo(tmp_path: Path) -> None:
    """A step is a round; what is left behind whole blocks is nobody else's."""
    one, other = read_requests(
        lines(
            tmp_path / "trace",
            {"step": 0, "prompt": 0, "sample": 0, "in": 40, "out": 5, "hash_ids": [3, 4]},
            {"step": 1, "prompt": 0, "sample": 0, "in": 40, "out": 6, "hash_ids": [3, 4]},
        )
    )
    assert (one.round, other.round) == (0, 1)
    assert tokens(one) == tokens(other) == list(range(48, 80))


def agents(path: Path) -> Path:
    """Sessions of 3, 1 and 2 requests; the second number of `out` is the session's."""
    rows: list[dict[str, Any]] = []
    for session, times in enumerate([[0, 10, 20], [0], [0, 4]]):
        rows.append({"session": session * 7})
        for count, t in enumerate(times, 1):
            rows.append({"t": t, "in": 64 * count, "out": 10 + session, "runs": [0, count]})
    return lines(path, *rows)


def test_agents_share_within_a_session_only(tmp_path: Path) -> None:
    requests = read_requests(agents(tmp_path / "trace"), residents=1)
    assert [request.session for request in requests] == [0, 0, 0, 1, 2, 2]
    first, second, third, alone, *_ = map(tokens, requests)
    assert second[:64] == first
    assert third[:128] == second
    assert not set(alone) & set(third)


@pytest.mark.parametrize(
    ("arrangement", "residents", "sessions"),
    [
        # Session 2 starts when 1 has ended, at 0 seconds of the second lane.
        ("time", 2, [0, 1, 2, 2, 0, 0]),
        ("time", 3, [0, 1, 2, 2, 0, 0]),
        ("rotation", 2, [0, 1, 0, 2, 0, 2]),
        ("rotation", 3, [0, 1, 2, 0, 2, 0]),
        ("rotation", 9, [0, 1, 2, 0, 2, 0]),
    ],
)
def test_sessions_are_arranged(
    tmp_path: Path, arrangement: str, residents: int, sessions: list[int]
) -> None:
    requests = read_requests(
        agents(tmp_path / "trace"), arrangement=arrangement, residents=residents
    )
    assert [request.session for request in requests] == sessions


def test_a_limit_and_a_longest_context(tmp_path: Path) -> None:
    path = agents(tmp_path / "trace")
    assert len(read_requests(path, limit=4, residents=1)) == 4
    # The session with 192 tokens is left out as a whole.
    assert [r.session for r in read_requests(path, max_context=150, residents=1)] == [1, 2, 2]
    with pytest.raises(TraceError, match="no requests of at most 10 tokens in it"):
        read_requests(path, max_context=10)
    with pytest.raises(ValueError, match="arrangement 'tiem' is not one of time, rotation"):
        read_requests(path, arrangement="tiem")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file is empty"),
        ("# Traces\n", "neither a Mooncake"),
        ("[1]\n", "neither a Mooncake"),
        ('{"a": 1}\n', "neither a Mooncake"),
        ("a,b\n1,2\n", "neither a Mooncake"),
        ('{"input_length": 3, "output_length": 1, "hash_ids": []}\n[]', ":2: not a JSON object"),
        ('{"input_length": 3, "output_length": 1, "hash_ids": []}\n{"inp', ":2: not JSON"),
        ('{"input_length": 3, "hash_ids": []}', ":1: no 'output_length'"),
        ('{"input_length": "x", "output_length": 1, "hash_ids": []}', ":1: "),
        ('{"input_length": 0, "output_length": 1, "hash_ids": []}', ":1: the length of the prompt"),
        ('{"input_length": true, "output_length": 1, "hash_ids": []}', ":1: the length of the pro"),
        ('{"input_length": 9, "output_length": 2.5, "hash_ids": []}', ":1: the length of the ans"),
        ('{"input_length": 9, "output_length": NaN, "hash_ids": []}', ":1: the length of the ans"),
        ('{"input_length": 9, "output_length": 1, "hash_ids": [-1]}', ":1: a block id is -1"),
        ('{"step": null, "in": 9, "out": 1, "hash_ids": []}', ":1: step is None"),
        (
            '{"session": 1}\n{"t": 0, "in": 64, "out": 1, "runs": [5, -3]}',
            ":2: the length of a run",
        ),
        (
            '{"session": 1}\n{"t": 0, "in": 64, "out": 1, "runs": [16777216, 1]}',
            ":2: a block id is",
        ),
        ("[" * 100_000, "neither a Mooncake"),
        ('{"step": 0, "in": 9, "out": 1, "hash_ids": ' + "[" * 100_000, ":1: not JSON"),
        ('{"input_length": 3, "output_length": 1, "hash_ids": 5}', ":1: "),
        ('{"session": 1}\n{"t": 0, "in": 64, "out": 1, "runs": [0]}', ":2: "),
        ('{"session": 1}\n{"in": 64, "out": 1, "runs": [0, 1]}', ":2: no 't'"),
        ('{"session": 1}\n', "no requests"),
        (" \n\n", "the file is empty"),
        ("ContextTokens,GeneratedTokens\n12,\n", ":2: "),
        ("ContextTokens,GeneratedTokens\n12\n", ":2: "),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError) as refusal:
        read_requests(path)
    assert str(refusal.value).startswith(str(path))
    assert complaint in str(refusal.value)
