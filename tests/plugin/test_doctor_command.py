"""``pyblockpool doctor``: what it prints, and its exit status."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVLLM
from implementations import HAS_VLLM
from rich.console import Console

from pyblockpool.cli import doctor, main
from pyblockpool.doctor import Attention, Backend, Diagnosis, Outcome, Question, Remark
from pyblockpool.plugin import environment, examination
from pyblockpool.settings import QUEUE_VARIABLE

ESCAPE = "\x1b["


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*environment.SWITCHES, "VLLM_PLUGINS", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    """Looked at in this process, for which it is made."""
    monkeypatch.setattr(doctor, "diagnose", examination.examine)
    return FakeVLLM(monkeypatch)


def page(diagnosis: Diagnosis, width: int) -> list[str]:
    """On a terminal."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None, markup=False)
    for part in doctor._page(diagnosis):
        console.print(part)
    return text.getvalue().splitlines()


MADE_UP = Diagnosis(
    asked={QUEUE_VARIABLE: "native"},
    works=False,
    probed="VLLM_BLOCK_QUEUE=native",
    facts=None,
    remarks=(
        Remark("installation", "good", "vLLM finds " + "the plugin " * 20 + "here"),
        Remark("probe", "bad", "block " * 40 + "is wrong. Mend it."),
        Remark("attention", "unknown", "cannot tell which"),
    ),
    outcomes=(
        Outcome("python", True, "as ever"),
        Outcome("native", False, "for one reason " * 8),
        Outcome("native:extent,size=4", False, "for one reason " * 8),
    ),
    attention=Attention(
        *("cpu", "A", "A", 16, 16, False),
        (Backend("A", "blocks", ""), *(Backend(f"BACKEND_{i}", "unknown", "") for i in range(40))),
    ),
)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_page_on_a_terminal(width: int) -> None:
    lines = page(MADE_UP, width)
    assert max(map(len, lines)) <= min(width, doctor.WIDEST)
    assert max(map(len, lines)) > min(width, doctor.WIDEST) - 12
    text = " ".join(" ".join(lines).split())
    for sentence in (
        "ok vLLM finds the plugin the plugin",
        "BAD Block block",
        "is wrong. Mend it. What each value",
        "? Cannot tell which. The attention backends",
        "BAD native:extent,size=4 as for native",
        "- read the blocks of a request, wherever they lie: A - 40 others: not known "
        "(--json names them) VLLM_BLOCK_QUEUE=native would not work here: see what is marked BAD. "
        "Where blocks lie does not matter to prefill with A.",
    ):
        assert sentence in text
    start = next(i for i, line in enumerate(lines) if line.startswith("BAD   Block"))
    assert all(line.startswith(" " * 6 + "block") for line in lines[start + 1 : start + 3])
    assert "Environment" not in text


def test_backends_that_are_not_known_are_counted() -> None:
    attention = MADE_UP.attention
    assert attention is not None
    for backends, line in (
        (attention.backends[:2], "      - 1 other: not known (--json names them)"),
        (attention.backends[1:], "      - 40: not known (--json names them)"),
    ):
        few = dataclasses.replace(attention, backends=backends)
        assert line in page(dataclasses.replace(MADE_UP, attention=few), 80)
    few = dataclasses.replace(attention, backends=attention.backends[:1])
    assert "not known" not in " ".join(page(dataclasses.replace(MADE_UP, attention=few), 80))


def test_marks_have_colours() -> None:
    assert {style.split()[-1] for _, style in doctor.MARKS.values()} == {
        *("green", "yellow", "red", "cyan")
    }
    assert len({mark for mark, _ in doctor.MARKS.values()}) == len(doctor.MARKS)


def test_a_page_in_a_pipe(host: FakeVLLM, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a remark, however long."""
    assert main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert ESCAPE not in printed.out + printed.err
    assert printed.err == ""
    lines = printed.out.splitlines()
    diagnosis = examination.examine(Question())
    for remark in diagnosis.remarks:
        (line,) = [line for line in lines if remark.sentence[1:] in line]
        assert line.startswith(doctor.MARKS[remark.level][0])
    assert lines[-2] == "Nothing is asked for: vLLM would run untouched."
    assert lines[-1].startswith("Whether it matters to prefill where blocks lie cannot be told")


def test_colours_and_none(
    host: FakeVLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    main(["doctor"])
    assert f"{ESCAPE}32mok" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["doctor"])
    assert f"{ESCAPE}3" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "plugins", "status", "last"),
    [
        ("native", None, 0, "VLLM_BLOCK_QUEUE=native would work here."),
        ("native:extent,size=4", None, 0, "VLLM_BLOCK_QUEUE=native:extent,size=4 would work here."),
        ("naive", None, 1, "VLLM_BLOCK_QUEUE=naive would not work here: see what is marked BAD."),
        ("", None, 1, "VLLM_BLOCK_QUEUE='' would not work here: see what is marked BAD."),
        ("native", "a", 1, "VLLM_BLOCK_QUEUE=native would not work here: see what is marked BAD."),
    ],
)
def test_the_verdict_and_the_exit_status(
    host: FakeVLLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: str,
    plugins: str | None,
    status: int,
    last: str,
) -> None:
    monkeypatch.setenv(QUEUE_VARIABLE, value)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == last
    assert any(line.startswith("BAD") for line in lines) == bool(status)
    assert main(["doctor", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert (found["asked"], found["works"]) == (
        {QUEUE_VARIABLE: value},
        not status,
    )


def attention_of(backend: str | None, costs: bool | None, *backends: Backend) -> Attention:
    return Attention("cpu", backend, backend, 16, 128, costs, backends)


@pytest.mark.parametrize(
    ("attention", "verdict"),
    [
        (attention_of("A", False), "Where blocks lie does not matter to prefill with A."),
        (
            attention_of("FLEX_ATTENTION", True),
            "Where blocks lie matters to prefill with FLEX_ATTENTION (tile 128, block 16).",
        ),
        (
            attention_of("B", None, Backend("B", "unknown", "it is odd")),
            "Whether it matters to prefill where blocks lie cannot be told (B: it is odd).",
        ),
        (attention_of("C", None), "cannot be told (C: see what is marked ?)."),
        (
            attention_of(None, None),
            "cannot be told (the attention backend is not known: see what is marked ?).",
        ),
        (None, "cannot be told (see what is marked ?)."),
    ],
)
def test_the_verdict_on_attention(attention: Attention | None, verdict: str) -> None:
    """The last line, which answers the second question."""
    text = " ".join(page(dataclasses.replace(MADE_UP, attention=attention), 100))
    before, _, last = text.partition("would not work here: see what is marked BAD. ")
    assert before.endswith("VLLM_BLOCK_QUEUE=native ")
    assert last.endswith(verdict)


def test_the_verdict_on_attention_without_vllm() -> None:
    remark = Remark("installation", "bad", "vLLM is not installed")
    diagnosis = dataclasses.replace(MADE_UP, remarks=(remark,), attention=None)
    reason = "cannot be told (vLLM cannot be imported: see what is marked BAD)."
    assert " ".join(page(diagnosis, 100)).endswith(reason)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--block-size", "0"], "--block-size: must be at least 1, not 0"),
        (["--flex-attn-kv-block-size", "x"], "--flex-attn-kv-block-size: invalid number value"),
        (["native"], "unrecognized arguments: native"),
    ],
)
def test_bad_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.out == ""


# The names that scripts rely on: a change of these is a change of the interface.
NAMES: dict[str, Any] = {
    "asked": None,
    "works": None,
    "probed": None,
    "facts": [
        *["pyblockpool", "package", "compiled", "vllm", "vllm_package", "torch", "python"],
        *["executable", "cpu", "cores", "gpus", "gpus_of_torch", "driver"],
    ],
    "remarks": ["topic", "level", "sentence"],
    "outcomes": ["value", "works", "sentence"],
    "attention": [
        *["platform", "chosen", "backend", "block_size", "flex_attention_tile"],
        *["fragmentation_costs", "backends"],
    ],
}


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_json_of_the_installed_vllm(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In its own process; what vLLM logs does not get in between."""
    environment = dict(os.environ)
    monkeypatch.setenv(QUEUE_VARIABLE, "native:extent")
    status = main(["doctor", "--json", "--attention-backend", "flex_attention"])
    printed = capfd.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert list(found) == list(NAMES)
    assert list(found["facts"]) == NAMES["facts"]
    assert list(found["attention"]) == NAMES["attention"]
    for name in ("remarks", "outcomes"):
        assert all(list(each) == NAMES[name] for each in found[name])
    assert all(list(each) == ["name", "reads", "reason"] for each in found["attention"]["backends"])
    assert status == 0, found["remarks"]
    assert found["works"]
    assert all(outcome["works"] for outcome in found["outcomes"])
    assert found["facts"]["vllm"]
    assert found["facts"]["compiled"]["_queue"].endswith(".so")
    monkeypatch.delenv(QUEUE_VARIABLE)
    assert dict(os.environ) == environment


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_backend_that_vllm_does_not_have(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--attention-backend", "flush"])
    assert ended.value.code == 2
    printed = capfd.readouterr()
    assert "has no attention backend 'FLUSH'; it has FLASH_ATTN" in printed.err
    assert printed.out == ""


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_tile_that_vllm_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--flex-attn-kv-block-size", "24"])
    assert ended.value.code == 2
    printed = capfd.readouterr()
    last = printed.err.splitlines()[-1]
    assert "refuses flex_attn_kv_block_size 24: ValueError: flex_attn_kv_block_size must" in last
    assert printed.out == ""


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_example_of_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
    example = re.search(r"^  pyblockpool (doctor .*)$", capfd.readouterr().out, re.MULTILINE)
    assert example
    assert main(shlex.split(example[1])) == 0
    printed = capfd.readouterr().out
    assert "With FLEX_ATTENTION, scattered blocks" in printed
    # Nothing is said about what vLLM takes here: that may be another.
    assert re.fullmatch(
        r"Where blocks lie .* to prefill with FLEX_ATTENTION\b[^.]*\.", printed.splitlines()[-1]
    )
