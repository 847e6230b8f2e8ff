"""The file of a block trace: its lines, its limits, and what may go wrong with a file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from block_traces import ended, table_arguments
from hypothesis import given
from hypothesis import strategies as st

from pyblockpool import trace_writer
from pyblockpool.trace_writer import TraceWriter

HEADER = {"model": "tiny", "num_blocks": 48}
Warned = list[str]


@pytest.fixture
def warned() -> Warned:
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def at_leisure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before the end."""
    monkeypatch.setattr(trace_writer, "INTERVAL", 3600.0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_writer, "INTERVAL", 0.001)


def table(request: str = "cmpl-1", *tables: Sequence[int], **more: Any) -> dict[str, Any]:
    """The arguments of `TraceWriter.put_table()`."""
    facts: dict[str, Any] = {
        "at": time.monotonic(),
        "outcome": "stop",
        "tokens": 120,
        "prefilled": (32, 0.25),
        "request": ended(request),
    }
    return facts | table_arguments(*tables or ([1, 2, 3],)) | more


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "not within 20 s"
        time.sleep(0.002)


def test_a_section(path: Path, warned: Warned) -> None:
    before = time.monotonic()
    writer = TraceWriter(str(path), HEADER, warned.append)
    writer.put_table(**table("cmpl-1", [5, 6, 7, 3, 4, 9], [8, 2], tokens=150))
    writer.put_table(**table("cmpl-2", [], outcome="abort", prefilled=(32, None)))
    writer.put_reset(time.monotonic(), "prefix_cache", False)
    writer.put_reset(time.monotonic(), "order", True)
    writer.close()
    header, *records, end = lines_of(path)
    assert path.read_text(encoding="utf-8").startswith('{"block_trace": 1, ')
    assert header == {"block_trace": 1, **HEADER}
    times = [record.pop("t") for record in records]
    assert 0 <= times[0] == times[1] <= times[2] <= times[3] <= times[4] <= end.pop("t")
    assert times[4] <= time.monotonic() - before
    common = {"request": "cmpl-1", "outcome": "stop", "prompt": 100, "tokens": 150, "hit": 32}
    aborted = {"request": "cmpl-2", "outcome": "abort", "prompt": 100, "tokens": 120, "hit": 0}
    assert records == [
        common | {"group": 0, "prefill": 0.25, "blocks": 6, "runs": [[5, 3], [3, 2], [9, 1]]},
        common | {"group": 1, "prefill": 0.25, "blocks": 2, "runs": [[8, 1], [2, 1]]},
        aborted | {"group": 0, "prefill": None, "blocks": 0, "runs": []},
        {"reset": "prefix_cache", "done": False},
        {"reset": "order", "done": True},
    ]
    assert end == {"end": "closed", "requests": 2, "lost": 0}
    assert warned == []


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ([0, 0, 1, 2], [[0, 2], [1, 2]]),
        ([0, 1], [[0, 1], [1, 1]]),
        ([1, 0, 0, 0, 2], [[1, 1], [0, 3], [2, 1]]),
        ([3, 2, 1], [[3, 1], [2, 1], [1, 1]]),
        ([7, 7, 8], [[7, 1], [7, 2]]),
        ([4], [[4, 1]]),
    ],
)
def test_runs(path: Path, warned: Warned, ids: list[int], runs: list[list[int]]) -> None:
    writer = TraceWriter(str(path), HEADER, warned.append)
    writer.put_table(**table("cmpl-1", ids))
    writer.close()
    assert lines_of(path)[1]["runs"] == runs


@given(st.lists(st.integers(0, 12), max_size=40))
def test_runs_spell_the_table(ids: list[int]) -> None:
    tables = table_arguments(ids)["tables"]
    (line,) = trace_writer._lines(0.0, ended(), "stop", 9, 0, None, tables).splitlines()
    runs = json.loads(line)["runs"]
    spelled = [first + (n if first else 0) for first, count in runs for n in range(count)]
    assert spelled == ids
    assert json.loads(line)["blocks"] == len(ids)
    for (first, count), (following, _) in pairwise(runs):
        assert following != (first + count if first else 0), "runs are as long as they can be"


@pytest.mark.parametrize("name", ['a"b\\c\n', "äöü \u2028 🙂", "\ud800", "", "x" * 5000])
def test_any_request_id(path: Path, warned: Warned, name: str) -> None:
    writer = TraceWriter(str(path), {"model": name}, warned.append)
    writer.put_table(**table(name, outcome=name))
    writer.close()
    header, line, _ = lines_of(path)
    assert (header["model"], line["request"], line["outcome"]) == (name, name, name)


def test_sections_follow_each_other(path: Path, warned: Warned) -> None:
    for number in range(3):
        writer = TraceWriter(str(path), {"number": number}, warned.append)
        writer.put_table(**table(f"cmpl-{number}"))
        writer.close()
        writer.close()
        writer.put_table(**table("too late"))
    lines = lines_of(path)
    assert [line.get("number") for line in lines] == [0, None, None, 1, None, None, 2, None, None]
    assert [line["request"] for line in lines if "request" in line] == [
        "cmpl-0",
        "cmpl-1",
        "cmpl-2",
    ]
    assert [line["requests"] for line in lines if "end" in line] == [1, 1, 1]


def test_records_are_in_the_file_soon(path: Path, warned: Warned, at_once: None) -> None:
    writer = TraceWriter(str(path), HEADER, warned.append)
    writer.put_table(**table())
    eventually(lambda: len(lines_of(path)) == 2)
    writer.close()
    assert [*lines_of(path)[2]] == ["t", "end", "requests", "lost"]


# Who may write.


def test_a_second_writer_in_the_process(path: Path, warned: Warned) -> None:
    writer = TraceWriter(str(path), HEADER, warned.append)
    with pytest.raises(BlockingIOError):
        TraceWriter(str(path), HEADER, warned.append)
    writer.close()
    TraceWriter(str(path), HEADER, warned.append).close()
    assert [*map(len, map(dict.keys, lines_of(path)))] == [3, 4, 3, 4]


OTHER_PROCESS = """
import sys, time
from types import SimpleNamespace
from pyblockpool import trace_writer
from pyblockpool.trace_writer import TraceWriter
trace_writer.INTERVAL = 0.001
writer = TraceWriter(sys.argv[1], {}, print)
blocks = [SimpleNamespace(block_id=n) for n in (1, 2)]
table = [0, len(blocks), blocks[0], blocks]
other = SimpleNamespace(request_id="other", num_prompt_tokens=9)
writer.put_table(time.monotonic(), other, "stop", 9, (0, None), len(blocks), table)
sys.stdout.write("open\\n")
sys.stdout.flush()
time.sleep(600)
"""


@pytest.fixture
def other_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Has written a record to the file, and goes on."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=path.parent) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            eventually(lambda: path.read_text(encoding="utf-8").count("\n") == 2)
            yield child
        finally:
            child.kill()


def test_another_process(path: Path, warned: Warned, other_process: subprocess.Popen[str]) -> None:
    """A file of another process is refused; one that was killed leaves its lines and no lock."""
    with pytest.raises(BlockingIOError):
        TraceWriter(str(path), HEADER, warned.append)
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    TraceWriter(str(path), HEADER, warned.append).close()
    lines = lines_of(path)
    assert [line["request"] for line in lines if "request" in line] == ["other"]
    assert ["end" in line for line in lines] == [False, False, False, True]


def test_a_line_that_was_cut_off_stays_one(path: Path, warned: Warned) -> None:
    path.write_text('{"block_trace": 1}\n{"t": 1.0, "requ', encoding="utf-8")
    TraceWriter(str(path), HEADER, warned.append).close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[1] == '{"t": 1.0, "requ'
    assert json.loads(lines[2])["num_blocks"] == 48


# Since Python 3.12 a fork beside a thread is warned of: this is what the test is about.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process(path: Path, warned: Warned) -> None:
    """It writes nothing, does not wait for a thread that it has not, and does not keep the lock."""
    writer = TraceWriter(str(path), HEADER, warned.append)
    writer.put_table(**table("parent"))
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            writer.put_table(**table("child"))
            writer.close()
            TraceWriter(f"{path}.child", HEADER, print).close()
            os.write(to_parent[1], b"closed")
            os.read(to_child[0], 1)
        finally:
            os._exit(0)
    try:
        assert os.read(to_parent[0], 6) == b"closed"
        writer.put_table(**table("parent"))
        writer.close()
        TraceWriter(str(path), HEADER, warned.append).close()
    finally:
        os.write(to_child[1], b"x")
        os.waitpid(child, 0)
        for end in (*to_child, *to_parent):
            os.close(end)
    assert [line.get("request") for line in lines_of(path)] == [
        *[None, "parent", "parent", None],
        *[None, None],
    ]
    assert len(lines_of(Path(f"{path}.child"))) == 2


# Files that are none.


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_something_else(path: Path) -> None:
    path.write_text("export PATH=/usr/bin\n", encoding="utf-8")


def make_locked_folder(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.parent.rmdir(), "No such file or directory"),
        (make_locked_folder, "Permission denied"),
        (make_pipe, "not a regular file"),
        (make_something_else, "something else than a block trace"),
    ],
    ids=["a folder", "in no folder", "not allowed", "a pipe", "something else"],
)
def test_what_cannot_be_written(
    tmp_path: Path, warned: Warned, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "folder" / "trace.jsonl"
    path.parent.mkdir()
    make(path)
    threads = threading.enumerate()
    try:
        with pytest.raises(OSError, match=message):
            TraceWriter(str(path), HEADER, warned.append)
    finally:
        if path.parent.exists():
            path.parent.chmod(stat.S_IRWXU)
    assert not path.is_file() or path.read_text(encoding="utf-8") == "export PATH=/usr/bin\n"
    assert set(threading.enumerate()) <= set(threads)


# A disk that is full: a limit on the size of files, which cuts a write in the middle like one.

FULL_DISK = """
import json, resource, sys, time
from types import SimpleNamespace
from pyblockpool import trace_writer
from pyblockpool.trace_writer import TraceWriter

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def put(name, count=1):
    for _ in range(count):
        blocks = [SimpleNamespace(block_id=n) for n in range(1, 200, 2)]
        table = [0, len(blocks), blocks[0], blocks]
        request = SimpleNamespace(request_id=name, num_prompt_tokens=9)
        writer.put_table(time.monotonic(), request, "stop", 9, (0, None), len(blocks), table)

def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)

path, play = sys.argv[1:]
warned = []
trace_writer.INTERVAL = 0.001
"""


def run_on_a_full_disk(path: Path, play: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK + play, str(path), "play"],
        cwd=path.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_disk_that_is_full_for_a_while(path: Path) -> None:
    """What it refuses is lost and counted, with one warning; no line is broken."""
    play = """
writer = TraceWriter(path, {}, warned.append)
put("before")
wait_until(lambda: open(path).read().count("\\n") == 2)
limit(2000)
put("refused", 3)
wait_until(lambda: warned)
put("refused", 2)
wait_until(lambda: writer._refused == 5)
limit(resource.RLIM_INFINITY)
put("after")
writer.close()
(sentence,) = warned
assert "File too large" in sentence and path in sentence, sentence
"""
    run_on_a_full_disk(path, play)
    lines = lines_of(path)
    assert [line.get("request") for line in lines] == [None, "before", "after", None]
    assert (lines[-1]["requests"], lines[-1]["lost"]) == (2, 5)


def test_a_disk_that_is_full_at_the_end(path: Path) -> None:
    play = """
writer = TraceWriter(path, {}, warned.append)
limit(40)
put("refused")
writer.close()
assert len(warned) == 1, warned
"""
    run_on_a_full_disk(path, play)
    assert lines_of(path) == [{"block_trace": 1}]


def test_a_disk_that_is_full_from_the_start(path: Path) -> None:
    play = """
limit(10)
try:
    TraceWriter(path, {}, warned.append)
except OSError as error:
    assert error.strerror == "File too large"
else:
    raise AssertionError
import threading
assert threading.active_count() == 1
limit(resource.RLIM_INFINITY)
TraceWriter(path, {}, warned.append).close()
"""
    run_on_a_full_disk(path, play)
    assert [*map(len, lines_of(path))] == [1, 4]


# Limits.


def test_the_size_of_a_section(
    path: Path, warned: Warned, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_BYTES", 20_000)
    path.write_text('{"block_trace": 1}\n' * 100, encoding="utf-8")
    before = path.stat().st_size
    writer = TraceWriter(str(path), HEADER, warned.append)
    number = 0
    while not writer.is_over:
        number += 1
        writer.put_table(**table(f"cmpl-{number}", range(1, 100, 2)))
        time.sleep(0.0005)
    assert not writer._waiting
    size = path.stat().st_size - before
    assert 18_000 < size < 20_000
    lines = lines_of(path)[100:]
    assert lines[-1]["end"] == "size limit"
    assert lines[-1]["requests"] == len(lines) - 2 < number
    assert [line["request"] for line in lines[1:-1]] == [
        f"cmpl-{n}" for n in range(1, len(lines) - 1)
    ]
    assert lines[-1]["lost"] == 0
    (sentence,) = warned
    assert "20,000 bytes" in sentence
    writer.put_table(**table("too late"))
    writer.close()
    assert path.stat().st_size - before == size
    TraceWriter(str(path), HEADER, warned.append).close()


def test_a_single_line_beyond_the_size(
    path: Path, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_BYTES", 1000)
    writer = TraceWriter(str(path), HEADER, warned.append)
    writer.put_table(**table("cmpl-1", range(1, 1000, 2)))
    writer.close()
    assert [line.get("end") for line in lines_of(path)] == [None, "size limit"]
    assert len(warned) == 1


def test_what_waits_in_memory(
    path: Path, warned: Warned, at_leisure: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_WAITING", 10_000)
    writer = TraceWriter(str(path), HEADER, warned.append)
    for number in range(1000):
        writer.put_table(**table(f"cmpl-{number}", range(1, 101)))
    fields = 11
    assert len(writer._waiting) == 61 * fields, "64 and 100 for each, until it is more than 10,000"
    writer.close()
    *_, end = lines = lines_of(path)
    assert (len(lines), end["requests"], end["lost"]) == (63, 61, 939)
    (sentence,) = warned
    assert "faster than they are written" in sentence


def test_is_behind(
    path: Path, warned: Warned, at_leisure: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 and 100 for each, until it is more than 500."""
    monkeypatch.setattr(trace_writer, "MANY_WAITING", 500)
    writer = TraceWriter(str(path), HEADER, warned.append)
    behind = []
    for number in range(5):
        behind.append(writer.is_behind)
        writer.put_table(**table(f"cmpl-{number}", range(1, 101)))
    writer.close()
    assert behind == [False, False, False, False, True]
    assert not writer.is_behind
    assert lines_of(path)[-1]["requests"] == 5


def test_a_disk_that_hangs(
    path: Path, warned: Warned, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever records never waits for it; the end of an engine not for ever."""
    writer = TraceWriter(str(path), HEADER, warned.append)
    hangs, goes_on = threading.Event(), threading.Event()
    write = os.write

    def slow_write(file: int, data: bytes) -> int:
        hangs.set()
        goes_on.wait(20)
        return write(file, data)

    monkeypatch.setattr(os, "write", slow_write)
    monkeypatch.setattr(trace_writer, "_PATIENCE", 0.01)
    writer.put_table(**table("first"))
    assert hangs.wait(20)
    for _ in range(1000):
        writer.put_table(**table("more"))
    writer.close()
    assert writer._thread.is_alive()
    assert len(lines_of(path)) == 1
    goes_on.set()
    writer._thread.join(20)
    assert lines_of(path)[-1]["requests"] == 1001


# The thread.


def test_closed_by_its_own_thread(
    path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer runs in whatever thread collects the garbage."""
    monkeypatch.setattr(trace_writer, "MAX_WAITING", 0)
    writers: list[TraceWriter] = []
    sentences: Warned = []

    def warn(sentence: str) -> None:
        sentences.append(sentence)
        writers[0].close()

    writers.append(TraceWriter(str(path), HEADER, warn))
    for _ in range(1000):
        writers[0].put_table(**table())
    eventually(lambda: not writers[0]._thread.is_alive())
    assert len(sentences) == 1
    assert lines_of(path)[-1]["end"] == "closed"


def test_an_error_that_nobody_expects(path: Path, warned: Warned) -> None:
    """The thread ends with a warning; the file is not locked any more."""
    writer = TraceWriter(str(path), HEADER, warned.append)
    nonsense: Any = ["x"]
    writer.put_table(**table("cmpl-1", nonsense))
    writer.close()
    (sentence,) = warned
    assert "has ended: TypeError" in sentence
    TraceWriter(str(path), HEADER, warned.append).close()


@pytest.mark.parametrize("change", ["reverse", "clear", "pop"])
def test_a_table_that_changes_after_its_end(
    path: Path, warned: Warned, at_leisure: None, change: str
) -> None:
    """It is not known any more what it was: better no line than a wrong one."""
    writer = TraceWriter(str(path), HEADER, warned.append)
    writer.put_table(**table("cmpl-1"))
    changed = table("cmpl-2")
    writer.put_table(**changed)
    getattr(changed["tables"][3], change)()
    writer.close()
    assert warned == [
        f"recording to {path} has ended: RuntimeError: this vLLM changes a table after its request "
        "has ended"
    ]
    assert len(lines_of(path)) == 1


def test_locks_of_others_are_not_waited_for(path: Path, warned: Warned) -> None:
    path.touch()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError) as caught:
            TraceWriter(str(path), HEADER, warned.append)
    assert caught.value.errno == errno.EWOULDBLOCK
