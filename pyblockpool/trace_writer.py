"""The file of a block trace: records go into a buffer, and a thread of their own writes them.

Who records must not wait for a disk, nor spend time on text: `TraceWriter.put_table()` keeps a
reference to each table and returns. About once a second the thread turns what has come in into
lines (JSON, UTF-8) and appends them. A file is made of sections, one for each engine; a section is
a header, records and an end line:

    header   {"block_trace": 1, ...}
    request  {"t", "request", "outcome", "group", "prompt", "tokens", "hit", "prefill", "blocks",
             "runs"}, for each KV-cache group of a request that gives up its blocks
    reset    {"t", "reset", "done"}
    end      {"t", "end", "requests", "lost"}

``t``: seconds since the header. ``runs`` spells the table in order, as ``[first, count]``: a run is
consecutive ascending ids, and the null block (id 0) makes runs of its own. ``requests`` counts the
requests that were written, ``lost`` the records that could not be.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Protocol

FORMAT = 1
# The outcome of requests that lost their blocks and will start again: they have another record.
PREEMPTED = "preempted"
# Every trace begins with it: to nothing else is ever appended.
MAGIC = b'{"block_trace": '
SOMETHING_ELSE = "it holds something else than a block trace"
# Bytes of a section, which ends then. A request with a table of 20 runs takes about 350.
MAX_BYTES = 256 << 20
# Blocks that may wait in memory, a reference each; a record counts as `_RECORD` more of them. What
# comes when they are more is lost.
MAX_WAITING = 1 << 22
_RECORD = 64
# With more than these waiting, the thread is behind: a disk hangs.
MANY_WAITING = 1 << 17
# A request holds its tokens: twice 8 bytes and an int for each. So many count as a block more, so
# that requests make about 100 MB before the thread is behind.
TOKENS_OF_A_BLOCK = 16
# Seconds between two looks into the buffer: what a crash loses.
INTERVAL = 1.0
# Python runs one thread at a time: this one works for so many blocks (about 0.5 ms, or one long
# request), and then leaves the interpreter to the engine for so many seconds.
_SLICE = 4096
_PAUSE = 0.0005
# Seconds that the end of an engine waits for a disk that hangs. vLLM kills an engine core 5 s after
# it has asked it to end, and by then the core has to end its workers, too.
_PATIENCE = 2.0
# An end line is shorter, in bytes.
_END_LINE = 256


class Request(Protocol):
    """Any request that has ended. These change no more then, so that they may be read later."""

    request_id: str
    num_prompt_tokens: int


class Block(Protocol):
    """Any block of a pool. Its id never changes, so that it may be read later."""

    block_id: int


class TraceWriter:
    """A section of a trace file, from its header to its end line.

    Records are put by one thread at a time. Only the constructor raises; only it and `close()` wait
    for the disk.

    Attributes:
        is_over: nothing is recorded any more.
    """

    def __init__(
        self,
        path: str,
        header: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        """Append the header to the file and start the thread.

        Args:
            path: of the file, which may exist already if it is a trace.
            header: what the first line says beside ``"block_trace"``.
            warn: called with a sentence, by the thread, once for each kind of trouble.

        Raises:
            BlockingIOError: another writer, in this process or in another one, has the file.
            OSError: it cannot be opened, locked or written, or is something else than a trace.
        """
        self.is_over = False
        self._path = path
        self._warn = warn
        # What waits lies flat, the fields of a record one after the other, which come at once: the
        # garbage collector would visit each tuple that stays.
        self._waiting: deque[Any] = deque()
        # Each of these is written by one thread only: what came in and what had no room by the one
        # that records, the others by ours.
        self._came_in = self._no_room = 0
        self._left = self._refused = self._requests = self._size = 0
        self._warned: set[str] = set()
        # Can be put to while the same thread gets from it, as a finalizer may have to.
        self._closing: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._file = _open(path)
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pyblockpool-trace")
        try:
            self._append(_line({"block_trace": FORMAT, **header}))
            self._thread.start()
        except BaseException:
            os.close(self._file)
            raise
        _open_writers.add(self)

    @property
    def is_behind(self) -> bool:
        """Whether so much is waiting that no more requests should be kept."""
        return self._came_in - self._left > MANY_WAITING

    def put_table(
        self,
        at: float,
        request: Request,
        outcome: str,
        tokens: int,
        prefilled: tuple[int, float | None],
        weight: int,
        tables: Sequence[Any],
    ) -> bool:
        """Take the record of a request that gives up its blocks; count it as lost without room.

        Flat, and many arguments: it is called for each request, and an object costs as much as a
        call.

        Args:
            at: moment, on the clock of `time.monotonic()`.
            request: read later, and let go of then.
            outcome: why it does.
            tokens: tokens that were computed, or found in the prefix cache.
            prefilled: those that were found; seconds from being scheduled to the first token, None
                if there was none.
            weight: what waits in memory with it, counted in blocks: those of all tables, and one
                for each `TOKENS_OF_A_BLOCK` tokens that the request holds.
            tables: for each KV-cache group four items: its number, how many blocks it has, the
                first of them (or None), and all of them in the order of the tokens. That list is
                read later. If it is not the same any more, the recording ends.

        Returns:
            False if nothing is recorded any more.
        """
        if self.is_over:
            return False
        if self._came_in - self._left > MAX_WAITING:
            self._no_room += 1
        else:
            self._came_in += _RECORD + weight
            self._waiting.extend(
                (at, request, outcome, tokens, prefilled, weight, len(tables), *tables)
            )
        return True

    def put_reset(self, at: float, reset: str, done: bool) -> None:
        """The same for a reset of ``"prefix_cache"`` or ``"order"``, and whether it was done."""
        if self.is_over:
            return
        if self._came_in - self._left > MAX_WAITING:
            self._no_room += 1
        else:
            self._came_in += _RECORD
            self._waiting.extend((at, None, reset, done))

    def stop(self) -> None:
        """Take no more records; the thread will write what is waiting, and the end line."""
        if not self.is_over:
            self.is_over = True
            self._closing.put("closed")

    def close(self) -> None:
        """`stop()`, and wait until that is done."""
        self.stop()
        # A finalizer can be run by any thread, by ours too.
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def forget(self) -> None:
        """In a forked process: the section goes on in the parent, and its thread is there."""
        self.is_over = True
        self._waiting.clear()
        with suppress(OSError):
            os.close(self._file)  # the lock is the parent's as long as that has it open

    # From here on in the thread.

    def _run(self) -> None:
        end = ""
        try:
            while not end:
                with suppress(queue.Empty):
                    end = self._closing.get(timeout=INTERVAL)
                if not self._write_waiting(in_haste=bool(end)):
                    end = "size limit"
            self._write_end(end)
        except Exception as error:
            self._warn(f"recording to {self._path} has ended: {type(error).__name__}: {error}")
        finally:
            self.is_over = True
            self._waiting.clear()
            _open_writers.discard(self)
            with suppress(OSError):
                os.close(self._file)

    def _write_waiting(self, in_haste: bool) -> bool:
        """Whether there was room in the section for all of it."""
        while self._waiting:
            lines: list[str] = []
            size = done = requests = 0
            while self._waiting and done < _SLICE:
                requests_in_it, weight, line = self._next()
                done += _RECORD + weight
                if self._size + size + len(line) > MAX_BYTES - _END_LINE:
                    self._write(lines, requests)
                    self._warn(
                        f"recording to {self._path} has ended: the {MAX_BYTES:,} bytes that "
                        "one engine may write are full"
                    )
                    return False
                lines.append(line)
                size += len(line)
                requests += requests_in_it
            self._write(lines, requests)
            self._left += done
            if self._no_room:
                self._warn_once(
                    f"block tables come faster than they are written to {self._path}: some are lost"
                )
            if not in_haste:
                time.sleep(_PAUSE)
        return True

    def _next(self) -> tuple[int, int, str]:
        """Requests and weight of a record that waited, and its lines."""
        field = self._waiting.popleft
        t = field() - self._started
        request = field()
        if request is None:
            return 0, 0, _line({"t": round(t, 6), "reset": field(), "done": field()})
        outcome, tokens, (hit, prefill), weight, size = (field() for _ in range(5))
        tables = [field() for _ in range(size)]
        if not any(tables[1::4]):
            hit = 0  # found, but never taken
        return 1, weight, _lines(t, request, outcome, tokens, hit, prefill, tables)

    def _write(self, lines: list[str], requests: int) -> None:
        try:
            self._append("".join(lines))
            self._requests += requests
        except OSError as error:
            self._refused += len(lines)
            self._warn_once(
                f"block tables cannot be written to {self._path} ({error.strerror}): they are lost "
                "until they can"
            )

    def _write_end(self, end: str) -> None:
        facts = {
            "t": round(time.monotonic() - self._started, 6),
            "end": end,
            "requests": self._requests,
            "lost": self._no_room + self._refused,
        }
        self._write([_line(facts)], 0)

    def _append(self, text: str) -> None:
        """All of it, or OSError and nothing."""
        data = text.encode("ascii")
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise
        self._size += written

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warn(sentence)


_open_writers: weakref.WeakSet[TraceWriter] = weakref.WeakSet()


def _forget_all() -> None:
    for writer in list(_open_writers):
        writer.forget()
    _open_writers.clear()


os.register_at_fork(after_in_child=_forget_all)


def _open(path: str) -> int:
    """Open to append, with an exclusive lock that goes with the last descriptor."""
    # Without O_NONBLOCK, opening a pipe waits for its reader.
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "it is not a regular file", path)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file).st_size
        if size:
            if os.pread(file, len(MAGIC), 0) != MAGIC:
                raise OSError(None, SOMETHING_ELSE, path)
            if os.pread(file, 1, size - 1) != b"\n":  # an engine that was killed while it wrote
                os.write(file, b"\n")
    except BaseException:
        os.close(file)
        raise
    return file


def _lines(
    t: float,
    request: Request,
    outcome: str,
    tokens: int,
    hit: int,
    prefill: float | None,
    tables: Sequence[Any],
) -> str:
    """Of a request, one for each KV-cache group."""
    first_token = "null" if prefill is None else f"{prefill:.6f}"
    # By hand: a third of the time that the json module takes.
    before = (
        f'{{"t": {t:.6f}, "request": {_quoted(request.request_id)}, "outcome": {_quoted(outcome)}, '
        '"group": '
    )
    between = (
        f', "prompt": {request.num_prompt_tokens}, "tokens": {tokens}, "hit": {hit}, '
        f'"prefill": {first_token}, "blocks": '
    )
    lines = []
    for at in range(0, len(tables), 4):
        group, count, first, table = tables[at : at + 4]
        if len(table) != count or (table and table[0] is not first):
            raise RuntimeError("this vLLM changes a table after its request has ended")
        lines.append(f'{before}{group}{between}{count}, "runs": [{_runs(table)}]}}\n')
    return "".join(lines)


def _line(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts) + "\n"


def _runs(table: Sequence[Block]) -> str:
    if not table:
        return ""
    runs: list[str] = []
    first = following = table[0].block_id
    count = 0
    for block in table:
        block_id = block.block_id
        if block_id == following:
            count += 1
        else:
            runs.append(f"[{first}, {count}]")
            first = block_id
            count = 1
        following = block_id and block_id + 1  # the null block is followed by itself
    runs.append(f"[{first}, {count}]")
    return ", ".join(runs)
