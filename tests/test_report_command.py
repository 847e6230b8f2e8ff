"""``pyblockpool report``: what it prints, and what it says about files that it cannot read."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from block_traces import FULL, WINDOW, end, header, request, reset, text, write

import pyblockpool
from pyblockpool.cli import main


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """Two rounds: tables of one run, then of single blocks, far apart."""
    return write(
        tmp_path / "stock.jsonl",
        header(queue=None, policy="lru", implementation="vllm", extent=None),
        request([1, 2, 3, 4], 48, hit=16, prefill=0.010),
        request([5, 6, 7, 8], 64, prefill=0.030),
        reset(),
        request([90, 10, 50, 30], 64, prefill=0.040, outcome="stop"),
        end(),
    )


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return write(
        tmp_path / "native.jsonl",
        header(),
        request([8, 9, 10, 11], 64, prefill=0.010),
        reset(),
        request([8, 9], 32, prefill=0.012),
        end(),
    )


def rows(printed: str, *labels: str) -> list[str]:
    """The rows that begin with a label or with a round, cells one blank apart."""
    found = [" ".join(line.split()) for line in printed.splitlines()]
    return [row for row in found if re.match(rf"(({'|'.join(labels)}) )?([0-9]+|all) ", row)]


def ran(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``pyblockpool report`` with the arguments."""
    try:
        status = main(["report", *map(str, arguments)])
    except SystemExit as refusal:  # of argparse
        status = int(refusal.code or 0)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_rounds_engines_and_all(
    stock: Path, native: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed, complaints = ran(capsys, stock, native)
    assert (status, complaints) == (0, "")
    prompts, whole = printed.split("whole tables: ")
    assert rows(prompts, "stock", "native") == [
        "stock 1 2 112 14.3% 3.5 3.5 1.50 100.0% 20.0 20.0",
        "2 1 64 0.0% 1.0 1.0 4.00 0.0% 40.0 40.0",
        "native 1 1 64 0.0% 4.0 4.0 1.00 100.0% 10.0 10.0",
        "2 1 32 0.0% 2.0 2.0 1.00 100.0% 12.0 12.0",
        "stock all 3 176 9.1% 1.8 3.0 2.33 62.5% 26.7 30.0",
        "native all 2 96 0.0% 3.0 3.0 1.00 100.0% 11.0 11.0",
    ]
    assert rows(whole, "stock", "native") == [
        "stock 1 2 8 4.0 4.0 1.50 100.0% 100.0% 4 1.0 1.00",
        "2 1 4 1.0 1.0 4.00 0.0% 0.0% 1 4.0 22.50",
        "native 1 1 4 4.0 4.0 1.00 100.0% 100.0% 4 1.0 2.75",
        "2 1 2 2.0 2.0 1.00 100.0% 100.0% 2 1.0 4.50",
        "stock all 3 12 2.0 4.0 2.33 66.7% 66.7% 4 2.0 7.50",
        "native all 2 6 3.0 3.0 1.00 100.0% 100.0% 4 1.0 2.75",
    ]
    assert "from being scheduled to the first token" in whole
    assert "longest run, in blocks" in whole
    for heading in ("prompts: the blocks that prefill computes and reads", "prefix", "merge-"):
        assert heading in prompts


def test_what_ran(stock: Path, native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = ran(capsys, stock, native)
    assert re.search(
        r"^stock +tiny-llama, vLLM 0\.32\.0, VLLM_BLOCK_QUEUE not set \(vllm queue, policy lru\), "
        r"100 blocks \(FullAttentionSpec, 2 layers, blocks of 16 tokens\), prefix cache on, "
        r"attention CPU_ATTN *\n +started 2026-11-30T12:00:00\+00:00, 3 requests; 2 rounds between "
        r"resets *$",
        printed,
        re.M,
    )
    assert "VLLM_BLOCK_QUEUE native:extent,size=8 (native queue, policy extent)" in printed


@pytest.mark.parametrize(
    ("changes", "last", "said"),
    [
        ({"model": None}, end(), "model not known"),
        ({"caching": False}, end(), "prefix cache off"),
        ({"dp_rank": 3}, end(), "data-parallel rank 3"),
        ({"groups": [FULL, WINDOW]}, end(), "2 layers, blocks of 16 tokens; SlidingWindowSpec, 3 "),
        (
            {},
            reset(),
            "no end line: it is still running, or ended before the line was written (killed, by "
            "vLLM at shutdown, too, or a crash), or the line could not be written; the last "
            "records may be missing",
        ),
        ({}, end(end="size limit"), "recording stopped: size limit"),
        ({}, end(lost=1200), "1,200 records lost"),
    ],
)
def test_what_is_worth_knowing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    last: dict[str, Any],
    said: str,
) -> None:
    trace = write(tmp_path / "trace", header(**changes), request([1], 9), last)
    status, printed, _ = ran(capsys, trace)
    assert status == 0
    assert said in printed


def test_a_long_trace_without_resets_is_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it says so."""
    trace = write(tmp_path / "trace", header(), *[request([1], 9)] * 64, end())
    _, printed, _ = ran(capsys, trace)
    assert (
        "64 requests; 8 stretches with the same number of requests, as no reset lies between them"
    ) in printed
    assert len(rows(printed, "trace")) == 2 * (8 + 1)


def test_columns_that_would_be_empty_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "trace", header(), request([1], 9, prefill=None))
    _, printed, _ = ran(capsys, trace)
    assert not any(word in printed for word in ("abor-", "preemp-", "prefill,"))
    outcomes = ("abort", "preempted", "preempted")
    trace = write(tmp_path / "trace", header(), *(request([1], 9, outcome=o) for o in outcomes))
    _, printed, _ = ran(capsys, trace)
    assert rows(printed, "trace")[0] == "trace all 1 1 2 9 0.0% 1.0 1.0 1.00 - 250 250"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_the_terminal_cannot_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Of files, which may be any bytes, and of models."""
    name = os.fsdecode(b"\xff.jsonl")
    row = header(model="mod\N{LATIN SMALL LETTER E WITH GRAVE}le")
    trace = write(tmp_path / name, row, request([1], 9))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    picture = tmp_path / "rounds.svg"
    assert main(["report", str(trace), "--plot", str(picture)]) == 0
    sys.stdout.flush()
    assert "\n\\udcff " in printed.getvalue().decode(encoding)
    assert r"\udcff" in picture.read_text(encoding="utf-8")


def test_several_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [request([1, 2], 32), request([0, 9], 32, group=1)]
    trace = write(tmp_path / "trace", header(groups=[FULL, WINDOW]), *lines)
    _, printed, _ = ran(capsys, trace)
    for group in (0, 1):
        assert f"KV-cache group {group}, prompts" in printed
        assert f"KV-cache group {group}, whole tables" in printed
    assert [row.split()[3] for row in rows(printed, "trace")][1::2] == ["2", "1"]


def test_options(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = ran(capsys, stock, "--rounds", 3, "--tile", 32, "--regions", 10)
    prompts, whole = printed.split("whole tables: ")
    assert [row.split()[-4] for row in rows(prompts, "stock")] == ["1.00", "1.50", "2.00", "1.50"]
    assert [row.split()[-2] for row in rows(whole, "stock")] == ["10.0", "10.0", "40.0", "20.0"]
    assert "3 stretches with the same number of requests" in printed
    assert "tiles of 32 tokens" in " ".join(printed.split())
    assert "in each of 10 regions of memory" in printed


PACKED = "tokens that tables touch, 1.00 if they were packed"


@pytest.mark.parametrize(
    ("block_sizes", "asked", "tiles", "meaning"),
    [
        ([16], 128, [128], f"of 128 {PACKED}"),
        ([64, 16], 128, [128, 128], f"of 128 {PACKED}"),
        ([16, 48], 100, [96, 96], f"of 96 {PACKED}; not of 100, as a tile is whole blocks"),
        ([16], 3, [16], f"of 16 {PACKED}; not of 3, as a tile is whole blocks"),
        (
            [1056, 16],
            128,
            [1056, 128],
            f"of 128 and 1,056 {PACKED}; not always of 128, as a tile is whole blocks",
        ),
    ],
)
def test_a_tile_is_whole_blocks(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    block_sizes: list[int],
    asked: int,
    tiles: list[int],
    meaning: str,
) -> None:
    """Where that is not what was asked for, the legend says so, and JSON has both."""
    groups = [FULL | {"block_size": each} for each in block_sizes]
    trace = write(tmp_path / "trace", header(groups=groups), request([1, 9], 32))
    _, printed, _ = ran(capsys, trace, "--tile", asked)
    assert re.findall("^tiles +(.*?) *$", printed, re.M) == [meaning]
    _, printed, _ = ran(capsys, trace, "--tile", asked, "--json")
    found = json.loads(printed)
    assert found["tile_tokens"] == asked
    for figures in (found["engines"][0]["all"], *found["engines"][0]["rounds"]):
        assert [group["tile_tokens"] for group in figures["groups"]] == tiles


def test_json(stock: Path, native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, _ = ran(capsys, stock, native, "--json", "--regions", 5)
    assert status == 0
    found = json.loads(printed, parse_constant=pytest.fail)
    assert (found["tile_tokens"], found["regions"]) == (128, 5)
    one, other = found["engines"]
    assert (one["file"], one["line"], one["label"], one["cut_lines"]) == (
        str(stock),
        1,
        "stock",
        [],
    )
    assert one["header"]["queue"] is None
    assert other["header"]["groups"] == [FULL]
    assert one["end"] == {"t": 9.0, "end": "closed", "requests": 3, "lost": 0}
    assert [figures["finished"] for figures in one["rounds"]] == [2, 1]
    assert one["rounds"][1]["groups"][0]["tables"]["descriptors"] == 20
    assert one["all"]["groups"][0]["prompts"] == {
        "tile": 8,
        "tables": 3,
        "blocks": 11,
        "runs": 6,
        "longest_run": 4,
        "tiles": 7,
        "packed_tiles": 3,
        "descriptors": 30,
        "blocks_per_run": 11 / 6,
        "median_blocks_per_run": 3.0,
        "mergeable_share": 5 / 8,
        "mergeable_share_either": 5 / 8,
        "tile_amplification": 7 / 3,
    }


class TestFilesThatAreNotWhole:
    def test_cut_off(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = tmp_path / "trace"
        trace.write_text(text(header(), request([1, 2], 32), request([3], 9))[:-5])
        status, printed, complaints = ran(capsys, trace)
        assert status == 0
        assert rows(printed, "trace")[0].startswith("trace all 1 32 ")
        assert "1 line cut off" in printed
        assert f"{trace}:3: the line is cut off" in complaints
        assert "1 request could be read" in complaints
        status, printed, _ = ran(capsys, trace, "--json")
        assert json.loads(printed)["engines"][0]["cut_lines"] == [3]

    def test_several_lines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = tmp_path / "trace"
        trace.write_text(text(header()) + "{\n{\n" + text(request([3], 9)) + "{\n")
        _, _, complaints = ran(capsys, trace)
        assert f"{trace}:2: " in complaints
        assert "and so are 2 more, up to line 5; 1 request could be read" in complaints

    def test_nothing_has_ended_yet(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, printed, complaints = ran(capsys, write(tmp_path / "trace", header()))
        assert (status, complaints) == (0, "")
        assert rows(printed, "trace")[0] == "trace all 0 0 - - - - -"
        assert "0 requests; one round" in printed

    def test_what_is_no_trace(
        self, stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        empty, later = tmp_path / "empty", write(tmp_path / "later", header(block_trace=2))
        empty.touch()
        wrong = (tmp_path / "nowhere", tmp_path, empty, later, Path(sys.executable))
        status, printed, complaints = ran(capsys, *wrong)
        assert (status, printed) == (1, "")
        for complaint, path in zip(complaints.splitlines(), wrong, strict=True):
            assert complaint.startswith("pyblockpool report: ")
            assert str(path) in complaint
        assert ":1: a block trace of format 2" in complaints
        # The others are reported all the same.
        status, printed, again = ran(capsys, *wrong[:2], stock, *wrong[2:])
        assert (status, again) == (0, complaints)
        assert rows(printed, "stock")[-1].startswith("stock all 3 12 ")

    def test_a_line_that_makes_no_sense(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trace = write(tmp_path / "trace", header(), request([1], 9), {"t": 3, "gossip": 1})
        status, printed, complaints = ran(capsys, trace)
        assert (status, printed) == (1, "")
        assert f"{trace}:3: neither a header" in complaints


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required: FILE"),
        (["--rounds", "0", "x"], "--rounds: must be at least 1, not 0"),
        (["--tile", "many", "x"], "--tile: invalid"),
        (["--regions", "-1", "x"], "--regions: must be at least 1, not -1"),
        (["--plot", "x.gif", "x"], "--plot: must end in .png, .svg, .pdf, unlike x.gif"),
        (["--plot", "nowhere/x.png", "x"], "--plot: there is no folder nowhere"),
    ],
)
def test_bad_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    status, printed, complaints = ran(capsys, *arguments)
    assert (status, printed) == (2, "")
    assert complaint in complaints


def test_the_example_of_the_help_works(
    stock: Path, native: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, helped, _ = ran(capsys, "--help")
    command, verb, *arguments = shlex.split(helped.split("example:\n")[1])
    assert (command, verb) == ("pyblockpool", "report")
    monkeypatch.chdir(stock.parent)
    status, _, told = ran(capsys, *arguments)
    assert (status, told) == (0, "pyblockpool report: the picture is in rounds.png\n")
    assert (stock.parent / "rounds.png").stat().st_size > 10_000


def test_without_matplotlib(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence instead of the work; without --plot nobody misses it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "pyblockpool.plots", raising=False)
    monkeypatch.delattr(pyblockpool, "plots", raising=False)
    status, printed, complaints = ran(capsys, stock, "--plot", tmp_path / "x.png")
    assert (status, printed) == (1, "")
    assert complaints.startswith("pyblockpool report: a plot needs matplotlib")
    assert "pip install 'pyblockpool[plot]'" in complaints
    assert ran(capsys, stock)[0] == 0


def test_pictures(
    stock: Path, native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        out = tmp_path / f"out{ending}"
        status, printed, told = ran(capsys, stock, native, "--plot", out)
        assert (status, told) == (0, f"pyblockpool report: the picture is in {out}\n")
        assert rows(printed, "stock", "native")
        assert out.read_bytes().startswith(magic)


def test_a_picture_beside_json(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is told about the picture does not get into the JSON, drawn or not."""
    nothing = write(tmp_path / "nothing", header())
    for traces, status, drawn in ((stock, nothing), 0, True), ((nothing,), 1, False):
        out = tmp_path / f"{status}.svg"
        found, printed, told = ran(capsys, *traces, "--json", "--plot", out)
        assert (found, out.exists()) == (status, drawn)
        assert len(json.loads(printed)["engines"]) == len(traces)
        assert told.startswith(f"pyblockpool report: {'the picture is in ' if drawn else ''}{out}")
        assert len(told.splitlines()) == 1


def test_a_picture_that_cannot_be_written(
    stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is told that it was."""
    out = tmp_path / "x.png"
    out.mkdir()
    status, _, told = ran(capsys, stock, "--plot", out)
    assert status == 1
    assert "the picture is in" not in told
    assert str(out) in told


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "trace", header())
    out = tmp_path / "x.png"
    status, printed, complaints = ran(capsys, trace, "--plot", out)
    assert status == 1
    assert rows(printed, "trace")
    assert complaints == (
        f"pyblockpool report: {out} is not written: no request has ended, so that there is nothing "
        "to draw\n"
    )
    assert not out.exists()


def command(*arguments: Any, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pyblockpool", "report", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, **environment},
    )


def test_a_pipe_gets_whole_lines_without_colour(tmp_path: Path) -> None:
    trace = write(tmp_path / ("t" * 90), header(), request([1], 9))
    for environment in ({"TERM": "xterm-256color"}, {"NO_COLOR": "1", "COLUMNS": "40"}):
        with command(trace, **environment) as process:
            printed, complaints = process.communicate()
        assert (process.returncode, complaints) == (0, "")
        assert "\x1b" not in printed
        assert "t" * 90 + " all 1 9 " in " ".join(printed.split())


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """As in ``| head -1``, with more to come than a pipe holds."""
    rounds = [row for _ in range(2000) for row in (request([1], 9), reset())]
    for arguments in ([], ["--json"]):
        with command(write(tmp_path / "trace", header(), *rounds), *arguments) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(5)
            process.stdout.close()
            assert process.wait() == 1
            assert process.stderr.read() == ""


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_terminal_has_room_for_what_matters(
    tmp_path: Path, native: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Names and rounds stay whole, and figures are left out rather than cut."""
    rows = [request([4, 9, 8], 48, prefill=1234.5), reset(), request([1], 9, outcome="abort")]
    stock = write(tmp_path / "stock-long-name.jsonl", header(), *rows * 6)
    printed = Terminal()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    assert main(["report", str(stock), str(native)]) == 0
    shown = re.sub("\x1b[^m]*m", "", printed.getvalue())
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for tables in shown.split("whole tables: "):
        for part in ("engine +round", "stock-long-name +1 +1 ", " 7 +1 ", "native +all +2 "):
            assert re.search(rf"^ *{part}", tables, re.M), part
        left_out = re.search("no room for .*median", " ".join(tables.split()))
        assert bool(left_out) == (width < 120)
        assert re.search(r"a run .*tiles ", tables)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
