"""Block traces: what is read, what is left out, and what is refused."""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_traces import (
    FULL,
    WINDOW,
    end,
    ended,
    header,
    request,
    reset,
    table_arguments,
    text,
    write,
)
from hypothesis import given
from hypothesis import strategies as st

from pyblockpool.block_trace import Group, Request, Reset, read_sections
from pyblockpool.errors import TraceError
from pyblockpool.trace_writer import TraceWriter


def requests_of(path: Path) -> list[Request]:
    return [
        record
        for section in read_sections(path)
        for record in section.records()
        if isinstance(record, Request)
    ]


def test_a_section(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace",
        header(),
        request([3, 4, 5, 9], 50, hit=16, request="a", outcome="stop"),
        reset(done=False),
        request([7], 16, request="b", outcome="preempted", prefill=None),
        reset(kind="order"),
        request([1, 2], 20, request="b"),
        end(lost=4),
    )
    (section,) = read_sections(path)
    found = section.header
    assert (found.pyblockpool, found.vllm, found.model) == ("0.1.0", "0.32.0", "tiny-llama")
    assert (found.queue, found.policy, found.extent) == ("native:extent,size=8", "extent", 8)
    assert (found.implementation, found.attention) == ("native", "CPU_ATTN")
    assert (found.pid, found.dp_rank, found.num_blocks, found.caching) == (4711, None, 100, True)
    assert found.groups == (Group(16, "FullAttentionSpec", 2),)
    assert (section.line, section.requests, section.preemptions, section.rounds) == (1, 2, 1, 2)
    assert section.end is not None
    assert (section.end.end, section.end.lost) == ("closed", 4)
    assert section.cut == []
    one, refused, preempted, order, two = section.records()
    assert isinstance(one, Request)
    assert (one.request, one.outcome, one.prompt, one.hit, one.prefill) == (
        "a",
        "stop",
        50,
        16,
        0.25,
    )
    assert one.table.dtype == np.int32
    assert one.table.tolist() == [3, 4, 5, 9]
    assert isinstance(refused, Reset)
    assert isinstance(order, Reset)
    assert (refused.done, order.done, order.reset) == (False, True, "order")
    assert isinstance(preempted, Request)
    assert preempted.prefill is None
    assert isinstance(two, Request)
    assert (two.t, two.group, two.tokens) == (1.5, 0, 32)


def test_the_null_block_joins_no_run(tmp_path: Path) -> None:
    """Two positions outside the window, and then blocks 1 and 2."""
    rows = [request([0, 0, 1, 2, 8], 16 * 4), request([0, 0], 32), request([], 32)]
    assert rows[0]["runs"] == [[0, 2], [1, 2], [8, 1]]
    one, nothing, empty = requests_of(write(tmp_path / "trace", header(groups=[WINDOW]), *rows))
    assert one.table.tolist() == [0, 0, 1, 2, 8]
    assert one.prompt_table(16).tolist() == [0, 0, 1, 2]
    assert nothing.table.tolist() == [0, 0]
    assert empty.table.tolist() == empty.prompt_table(16).tolist() == []


@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 20)), max_size=15),
    st.integers(0, 300),
    st.sampled_from([1, 7, 16]),
)
def test_tables_come_back_as_they_were(table: list[int], prompt: int, block_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        (found,) = requests_of(write(path, header(), request(table, prompt)))
    assert found.table.dtype == np.int32
    assert found.table.tolist() == table
    in_prompt = [block for i, block in enumerate(table) if i * block_size < prompt]
    assert found.prompt_table(block_size).tolist() == in_prompt


def test_what_the_recorder_writes_is_read(tmp_path: Path) -> None:
    """Two engines, one after the other, in one file."""
    facts = {name: value for name, value in header().items() if name != "block_trace"}
    tables = ([0, 0, 1, 2, 8], [5, 4, 3])
    for pid in (1, 2):
        about = facts | {"pid": pid, "groups": [WINDOW, FULL]}
        writer = TraceWriter(str(tmp_path / "trace"), about, pytest.fail)
        at, more = time.monotonic(), table_arguments(*tables)
        writer.put_table(at, ended("a", 70), "preempted", 80, (16, None), **more)
        writer.put_reset(at, "order", True)
        writer.put_table(at, ended("a", 70), "stop", 90, (16, 0.25), **more)
        writer.close()
    for pid, section in enumerate(read_sections(tmp_path / "trace"), 1):
        assert (section.header.pid, section.requests, section.preemptions) == (pid, 1, 1)
        assert (section.rounds, section.cut) == (2, [])
        assert section.end is not None
        assert (section.end.end, section.end.requests, section.end.lost) == ("closed", 2, 0)
        *before, order, one, other = section.records()
        assert len(before) == 2
        assert isinstance(order, Reset)
        for group, record in enumerate((one, other)):
            assert isinstance(record, Request)
            assert (record.outcome, record.group, record.prefill) == ("stop", group, 0.25)
            assert (record.prompt, record.tokens, record.hit) == (70, 90, 16)
            assert record.table.tolist() == tables[group]
    assert pid == 2


def test_sections_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    rows = [header(pid=1), request([1], 9), end(), header(pid=2), header(pid=3), request([2, 3], 9)]
    write(path, *rows)
    first, idle, last = read_sections(path)
    assert [each.header.pid for each in (first, idle, last)] == [1, 2, 3]
    assert [each.line for each in (first, idle, last)] == [1, 4, 5]
    assert [each.requests for each in (first, idle, last)] == [1, 0, 1]
    assert [len(list(each.records())) for each in (first, idle, last)] == [1, 0, 1]
    assert (idle.end, last.end) == (None, None)


def test_what_is_written_while_we_read_is_left_for_later(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", header(), request([1], 9))
    (section,) = read_sections(path)
    with path.open("a") as file:
        file.write(text(request([2], 9)))
    assert len(list(section.records())) == 1
    assert read_sections(path)[0].requests == 2


def test_requests_of_several_groups_count_once(tmp_path: Path) -> None:
    rows = [
        request([1], 9, group=group, outcome=o) for o in ("preempted", "stop") for group in (0, 1)
    ]
    (section,) = read_sections(write(tmp_path / "trace", header(groups=[FULL, WINDOW]), *rows))
    assert (section.requests, section.preemptions) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "rounds"),
    [
        ([], 0),
        ([reset()], 0),
        ([reset(), request([1], 9), reset()], 1),
        ([request([1], 9), reset(done=False), request([1], 9)], 1),
        ([request([1], 9), reset(), reset(kind="order"), request([1], 9)], 2),
    ],
)
def test_rounds_lie_between_resets_that_were_done(
    tmp_path: Path, rows: list[dict[str, Any]], rounds: int
) -> None:
    (section,) = read_sections(write(tmp_path / "trace", header(), *rows))
    assert section.rounds == rounds


def test_keys_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    rows = [header(later=1), request([1], 9, later=[2]), reset() | {"later": 3}, end(later=4)]
    (section,) = read_sections(write(tmp_path / "trace", *rows))
    assert section.requests == 1


class TestLinesThatAreNotWhole:
    def test_any_cut(self, tmp_path: Path) -> None:
        """Wherever a crash cuts a trace: the lines before are read, the number of the line told."""
        path = tmp_path / "trace"
        whole = text(header(), request([1, 2, 5], 40), reset(), request([3], 9), end()).encode()
        header_length = whole.index(b"\n")
        for length in range(1, len(whole)):
            path.write_bytes(whole[:length])
            if length < header_length:
                with pytest.raises(
                    TraceError, match=r"not a block trace|:1: the header is cut off"
                ):
                    read_sections(path)
                continue
            (section,) = read_sections(path)
            lines = whole[:length].split(b"\n")
            last = lines[-1]
            assert section.cut == ([len(lines)] if last and not last.endswith(b"}") else [])
            assert section.requests == sum(line.endswith(b"]]}") for line in lines)

    def test_an_engine_that_starts_behind_a_crash(self, tmp_path: Path) -> None:
        """Its header stands in the middle of a line."""
        path = tmp_path / "trace"
        crashed = text(header(pid=1), request([1], 9), request([2], 9))[:-30]
        path.write_text(crashed + text(header(pid=2), request([3], 9)))
        before, after = read_sections(path)
        assert (before.header.pid, before.requests, before.cut) == (1, 1, [3])
        assert (after.header.pid, after.requests, after.cut, after.line) == (2, 1, [], 3)
        assert [len(list(each.records())) for each in (before, after)] == [1, 1]

    def test_each_byte_is_read_once(self, tmp_path: Path) -> None:
        path = tmp_path / "trace"
        path.write_text(text(header(), request([1], 9))[:-9] + text(header(), request([3], 9)))
        read: list[int] = []
        sections = read_sections(path, read.append)
        assert sum(read) == path.stat().st_size
        read.clear()
        for section in sections:
            list(section.records(read.append))
        headers = path.stat().st_size - sum(each.stop - each.start for each in sections)
        assert sum(read) == path.stat().st_size - headers > 0

    def test_an_engine_that_starts_behind_a_header_that_is_cut_off(self, tmp_path: Path) -> None:
        path = tmp_path / "trace"
        path.write_text(text(header(pid=1))[:40] + text(header(pid=2), request([3], 9)))
        (section,) = read_sections(path)
        assert (section.header.pid, section.cut, section.requests) == (2, [1], 1)

    @pytest.mark.parametrize(
        "hole", [b'{"t": 1, "requ\n', b"\0" * 100 + b"\n", b"\xff\xfe\n", b"[" * 9999 + b"\n"]
    )
    def test_in_the_middle(self, tmp_path: Path, hole: bytes) -> None:
        """As a disk leaves them that was full for a while."""
        path = tmp_path / "trace"
        path.write_bytes(
            text(header(), request([1], 9)).encode() + hole + text(request([2], 9)).encode()
        )
        (section,) = read_sections(path)
        assert (section.cut, section.requests) == ([3], 2)
        assert [each.table.tolist() for each in requests_of(path)] == [[1], [2]]

    def test_blank_lines_are_none(self, tmp_path: Path) -> None:
        path = tmp_path / "trace"
        path.write_text(text(header()) + "\n\n" + text(request([1], 9)))
        (section,) = read_sections(path)
        assert (section.cut, section.requests) == ([], 1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"", "the file is empty"),
            (b"\x7fELF\x02\x01\x01\0\0", "not a block trace"),
            (b"{" + b"x" * (1 << 21), "not a block trace"),
            (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "not a block trace"),
            (b'{"input_length": 5, "output_length": 3, "hash_ids": []}\n', "not a block trace"),
            (b'{"block_trace": 1, "pyblo', ":1: the header is cut off"),
            (
                text(header(block_trace=2, pyblockpool="0.9.0")).encode(),
                ":1: a block trace of format 2, written by pyblockpool 0.9.0",
            ),
            (text(header(block_trace="1")).encode(), "of format '1'"),
            (text(request([1], 9)).encode(), ":1: no header before it"),
        ],
    )
    def test_files_that_are_no_trace(self, tmp_path: Path, content: bytes, complaint: str) -> None:
        path = tmp_path / "trace"
        path.write_bytes(content)
        with pytest.raises(TraceError) as refusal:
            read_sections(path)
        assert complaint in str(refusal.value)
        assert str(path) in str(refusal.value)

    def test_what_cannot_be_opened(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            read_sections(tmp_path / "nowhere")
        with pytest.raises(IsADirectoryError):
            read_sections(tmp_path)

    def test_pipes(self, tmp_path: Path) -> None:
        read, written = os.pipe()
        os.close(written)
        try:
            with pytest.raises(TraceError, match="a pipe, and traces are read twice"):
                read_sections(Path(f"/dev/fd/{read}"))
        finally:
            os.close(read)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"num_blocks": 0}, "num_blocks is 0, not a number from 1 on"),
            ({"num_blocks": True}, "num_blocks is True"),
            ({"vllm": None}, "vllm is None, not a text"),
            ({"queue": 3}, "queue is 3, not a text"),
            ({"caching": 1}, "caching is 1, neither true nor false"),
            ({"groups": []}, "groups is [], not a list of KV-cache groups"),
            ({"groups": [3]}, "groups is [3]"),
            ({"groups": [FULL | {"block_size": 0}]}, "block_size is 0"),
        ],
    )
    def test_headers(self, tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
        path = write(tmp_path / "trace", header() | change)
        with pytest.raises(TraceError) as refusal:
            read_sections(path)
        assert f"{path}:1: {complaint}" in str(refusal.value)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"group": 1}, "group is 1, and the header has 1"),
            ({"group": -1}, "group is -1"),
            ({"prompt": 1.5}, "prompt is 1.5"),
            ({"t": float("nan")}, "t is nan"),
            ({"t": True}, "t is True"),
            ({"prefill": "soon"}, "prefill is 'soon'"),
            ({"outcome": None}, "outcome is None"),
            ({"blocks": 4}, "blocks is 4, but the runs have 3"),
            ({"blocks": None}, "blocks is None, but the runs have 3"),
            ({"runs": None}, "runs is not a list"),
            ({"runs": [[1, 2], [3]]}, "runs is not a list"),
            ({"runs": [[1, 1.5]]}, "runs is not a list"),
            ({"runs": [1, 2]}, "runs is not a list"),
            ({"runs": [["1", "2"]]}, "runs is not a list"),
            ({"runs": [[1 << 70, 2]]}, "runs is not a list"),
            ({"runs": {}}, "runs is not a list"),
            ({"runs": [[-1, 3]]}, "runs has a negative block"),
            ({"runs": [[1, 0]]}, "runs has a negative block, or a run without blocks"),
            (
                {"runs": [[0, 1 << 40]]},
                "runs has a block that a pool of 100 does not have",
            ),
            ({"runs": [[0, 1 << 24], [0, 1]]}, "runs has more blocks than a table"),
            ({"runs": [[98, 3]]}, "runs has a block that a pool of 100 does not have"),
            (
                {"runs": [[1, 60], [1, 60]]},
                "runs has more blocks than a table of a pool of 100 can have",
            ),
        ],
    )
    def test_requests(self, tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
        path = write(tmp_path / "trace", header(), request([1, 2, 3], 40) | change)
        with pytest.raises(TraceError) as refusal:
            read_sections(path)
        assert f"{path}:2: {complaint}" in str(refusal.value)

    def test_other_lines(self, tmp_path: Path) -> None:
        path = write(tmp_path / "trace", header(), {"t": 1, "gossip": 3})
        with pytest.raises(
            TraceError, match=r"trace:2: neither a header, .* but a line with t, gossip"
        ):
            read_sections(path)
        for row in (reset() | {"done": 1}, end(lost=-1), end(requests=None)):
            with pytest.raises(TraceError, match=r"trace:2: (done|lost|requests) is"):
                read_sections(write(path, header(), row))


def test_a_long_trace_needs_little_memory(tmp_path: Path) -> None:
    """It is read line by line: four times the trace, the same memory."""
    rows = [request(list(range(1, 2000, 2)), 9)] * 50
    peaks = []
    for times in (1, 4):
        path = write(tmp_path / "trace", header(num_blocks=3000), *(rows * times))
        tracemalloc.start()
        for section in read_sections(path):
            assert sum(1 for _ in section.records()) == 50 * times
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
